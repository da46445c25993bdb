"""Kernels that share a launch, in Triton: one goes on where another ends, or runs on programs of its own."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from codegen.triton import Config
from codegen.triton.launch.build import unaligned
from lowering.errors import BuildError
from lowering.kernel import Kernel, Role
from tests.codegen.kernels.making import BF16, F16, packed
from tests.codegen.kernels.pointwise import add, bias_gelu
from tests.codegen.kernels.products import gated, matmul
from tests.codegen.kernels.rows import column_totals, softmax, total
from tests.codegen.triton_texts import TARGET, compiles, stages


@compiles
@pytest.mark.parametrize("made", [total(1 << 20, 2048), column_totals(512, 40, 64)], ids=lambda made: made.name)
def test_the_last_program_goes_on(made: Kernel) -> None:
    found = stages(made)
    assert found["ttir"].count("tt.func public") == 1
    before, after = found["ptx"].split("atom.global.gpu.acq_rel.add.u32")
    assert before.rindex("st.global") < before.rindex("bar.sync")
    assert "ld.global.cg" in after and "ld.global.cg" not in before
    assert stages(made, "gfx942")["hsaco"]


@compiles
def test_two_products_of_the_same_rows_are_one() -> None:
    """The matrix units take the columns of both at a time, and no thread moves an operand."""
    found = stages(gated(4096, 5632, 2048, turned=True))
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+)", found["ptx"])) == {"m64n256"}
    assert "ldmatrix" not in found["ptx"]
    text = TARGET.emit(gated(4096, 5632, 2048))
    assert text.count("tl.dot(") == 2  # stored the other way round, they stay two


@compiles
def test_independent_kernels_are_one_function_on_ranges_of_programs() -> None:
    made = packed("packed", add(5000), bias_gelu(7, 40, F16), add(3))
    text = TARGET.emit(made)
    assert re.search(r"return \(\d+ \+ \d+ \+ \d+,\)", text)
    assert stages(made)["ttir"].count("tt.func public") == 1
    assert stages(made, "gfx942")["hsaco"]


@compiles
def test_odd_rows_stay_one_per_program_beside_others_with_more_warps() -> None:
    odd, wide = softmax(2048, 50257, Role.LOOP, F16), softmax(64, 32768, Role.WHOLE, F16)
    text = TARGET.emit(packed("packed", odd, wide))
    assert '"num_warps": 32' in text and "r_shift = program % 8" in text
    assert stages(packed("packed", odd, wide))["cubin"]


@compiles
def test_persistent_parts_share_warps_and_stages() -> None:
    made = packed("packed", matmul(4096, 4096, 512, BF16, out=BF16), gated(4096, 1024, 512, turned=True))
    text = TARGET.emit(made)
    assert text.count("tl.range(program, ") == 2 and "if program" not in text
    assert set(re.findall(r"\.(m\d+n\d+)k16", stages(made)["ptx"])) == {"m64n256"}


def test_parts_without_promises_are_emitted_anew() -> None:
    made = packed("packed", matmul(4096, 4096, 512, BF16), gated(4096, 1024, 512, turned=True))
    text = TARGET.emit(unaligned(made))
    assert "tl.make_tensor_descriptor(" not in text and text.count("tl.dot(") == 3


def test_only_kernels_of_like_needs_share_a_launch() -> None:
    products = [matmul(4096, 4096, 512, BF16), matmul(4096, 1024, 512, BF16), matmul(40, 35, 33, BF16)]
    assert TARGET.packs(products[0], products[1])
    assert not TARGET.packs(products[0], products[2]) and not TARGET.packs(products[0], add(1 << 20))
    assert TARGET.packs(add(1 << 20), add(70)) and not TARGET.packs(add(70), softmax(50, 300, Role.WHOLE))
    assert TARGET.packs(softmax(5000, 300, Role.WHOLE), softmax(5000, 500, Role.WHOLE))
    assert not TARGET.packs(softmax(5000, 300, Role.WHOLE), softmax(5000, 16384, Role.WHOLE))


def test_what_follows_is_walked_where_its_warps_cannot_hold_it() -> None:
    long = TARGET.emit(total(1 << 20, 8192))
    assert '"num_warps": 4' in long and "for r0 in" in long
    assert "for r0 in" not in TARGET.emit(total(1 << 20, 1024))
    columns = TARGET.emit(column_totals(1 << 12, 40, 512))
    assert re.findall(r"for \w+ in", columns) == ["for r0 in"]


@compiles
def test_a_pipeline_too_deep_for_the_shared_memory_is_shortened() -> None:
    made = matmul(1024, 1024, 1024, BF16)
    deep = Config((("m", 128), ("k", 128), ("n", 256)), num_warps=8, num_stages=6)
    assert stages(made, config=deep)["cubin"]
    with pytest.raises(BuildError, match="shared memory"):
        stages(made, config=Config((("m", 64), ("k", 1024), ("n", 64)), num_warps=8))
