"""Forms: the form of each kernel, and that their order and their refusals agree with their sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from fusion.codegen.numerics import DEFAULT
from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.devices import H200, device_of
from fusion.codegen.triton.forms import FORMS, SINGLE_KERNEL, Form, Refused, Task, candidates, form_of, single_kernel
from fusion.codegen.triton.forms.alternating_product import AlternatingProduct
from fusion.codegen.triton.forms.chained import Chained
from fusion.codegen.triton.forms.last_block import LastBlock
from fusion.codegen.triton.forms.maps import Maps
from fusion.codegen.triton.forms.matrix_vector import MatrixVector
from fusion.codegen.triton.forms.persistent_product import PersistentConfig, PersistentProduct
from fusion.codegen.triton.forms.pointer_product import PointerProduct
from fusion.codegen.triton.forms.rows import Rows
from fusion.codegen.triton.forms.scans import Scans
from fusion.codegen.triton.forms.side_by_side import JoinedAlternatingProducts, JoinedProducts, SideBySide
from fusion.codegen.triton.forms.skinny import Skinny
from fusion.codegen.triton.forms.warp_specialised import WarpSpecialised
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.attention import online_attention
from tests.codegen.kernels.large import LARGE
from tests.codegen.kernels.making import BF16, F32, LOOP, WHOLE
from tests.codegen.kernels.pointwise import add
from tests.codegen.kernels.products import linear, matmul
from tests.codegen.kernels.rows import scan, softmax
from tests.codegen.kernels.small import SMALL
from tests.codegen.triton.test_persistent import activated

KERNELS = {**{f"small {name}": kernel for name, kernel in SMALL.items()}, **LARGE}
PRODUCT = matmul(4096, 2048, 2048, BF16)


def beside(kernel: Kernel) -> Kernel:
    """A kernel twice in one launch."""
    return replace(kernel, beside=(replace(kernel, name="other"),))


FIRST: dict[str, tuple[Kernel, type[Form]]] = {
    "map": (add(1 << 20), Maps),
    "rows": (softmax(4096, 1024, WHOLE), Rows),
    "scan": (scan("sum", 64, 4096, LOOP), Scans),
    "matrix and vectors": (linear(4, 4096, 4096, BF16), MatrixVector),
    "few columns": (matmul(16, 4096, 4096, BF16), Skinny),
    "halves": (matmul(8192, 4096, 4096, BF16, out=BF16), AlternatingProduct),
    "halves of few blocks": (matmul(1024, 2048, 2048, BF16, out=BF16), PersistentProduct),
    "float32": (matmul(4096, 4096, 4096, F32), PointerProduct),
    "rows at odd addresses": (matmul(4096, 4099, 515, BF16), PointerProduct),
    "attention": (online_attention(32, 4096, 4096, 128, dtype=BF16), WarpSpecialised),
    "attention of heads too wide": (online_attention(32, 4096, 4096, 320, dtype=BF16), Chained),
    "side by side": (replace(add(1000), beside=(softmax(100, 64, WHOLE),)), SideBySide),
    "products of the same rows": (beside(matmul(1024, 1024, 2048, BF16, out=BF16)), JoinedProducts),
    "large products of the same rows": (beside(activated(8192, 3072, 768, smooth=True)), JoinedAlternatingProducts),
    "long products of the same rows": (beside(PRODUCT), JoinedProducts),
    "last block": (replace(softmax(100, 64, WHOLE), then=softmax(1, 64, WHOLE)), LastBlock),
}


def task_of(kernel: Kernel, arch: str = "sm_90") -> Task:
    return Task(kernel, device_of(arch), DEFAULT)


@pytest.mark.parametrize("name", FIRST)
def test_the_form_that_a_kernel_takes(name: str) -> None:
    kernel, expected = FIRST[name]
    form, _ = candidates(task_of(kernel))[0]
    assert type(form) is expected


def test_all_forms_are_in_the_order() -> None:
    def below(form: type[Form]) -> set[type[Form]]:
        return {form, *(each for sub in form.__subclasses__() for each in below(sub))}

    assert set(FORMS) == below(Form) - {Form}
    assert FORMS[-len(SINGLE_KERNEL) :] == SINGLE_KERNEL


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_choice_is_taken_by_its_form(name: str, arch: str) -> None:
    task = task_of(KERNELS[name], arch)
    choices = candidates(task)
    assert choices, "a kernel without form"
    for form, config in choices:
        assert type(config) in form.takes
        assert type(form_of(task, config)).__dict__.get("open") is type(form).__dict__.get("open")
        assert form.relative_time(config) > 0.0


@pytest.mark.parametrize("name", KERNELS)
def test_a_form_applies_or_says_why_not(name: str) -> None:
    for form in SINGLE_KERNEL:
        plan = form.applies(task_of(KERNELS[name]))
        assert plan.why if isinstance(plan, Refused) else isinstance(plan, form)


def test_the_default_is_the_first_that_no_later_form_beats() -> None:
    """Attention of narrow heads with a mask: warp-specialised is possible, and slower."""
    task = task_of(online_attention(32, 4096, 4096, 64, dtype=BF16, causal=True))
    plans = single_kernel.plans(task)
    assert [type(plan) for plan in plans] == [WarpSpecialised, Chained]
    assert plans[0].slower and type(single_kernel.default(task)) is Chained
    assert type(candidates(task)[1][0]) is WarpSpecialised, "still worth timing"


def test_devices_without_tensor_memory_have_pointer_products() -> None:
    kernel = matmul(4096, 4096, 4096, BF16)
    assert [type(plan) for plan in single_kernel.plans(task_of(kernel, "sm_80"))] == [PointerProduct]
    refused = PersistentProduct.applies(task_of(kernel, "sm_80"))
    assert isinstance(refused, Refused) and "sm_80" in refused.why


def test_a_configuration_that_no_form_takes_is_refused() -> None:
    target, kernel = TritonTarget("sm_90"), add(1000)
    assert "XBLOCK" in target.emit(kernel, Config((("x", 256),)))
    with pytest.raises(ValueError, match=r"add has no form that takes the configuration x 256, 4 warps, persistent"):
        target.emit(kernel, PersistentConfig((("x", 256),)))


def test_without_a_fitting_configuration_the_smallest_is_used() -> None:
    task = Task(matmul(4096, 4096, 4096, BF16), replace(H200, shared_per_program=1024), DEFAULT)
    (form, config), *others = candidates(task)
    assert not others and config.num_stages == 1
    assert form.room(config) == min(
        plan.room(replace(each, num_stages=1)) for plan in single_kernel.plans(task) for each in plan.configs()
    )
