"""Kernels that share a launch, in Triton: one continues where another ends, or runs on programs of its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import sympy
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.codegen.triton import Config
from fusion.codegen.triton.devices import H200
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.load import load as imported
from fusion.codegen.triton.launch.sources import unaligned
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel, Role
from fusion.schedule.kernels import KernelCall
from tests.codegen.kernels.making import BF16, F16, packed
from tests.codegen.kernels.pointwise import add, bias_gelu
from tests.codegen.kernels.products import gated, matmul
from tests.codegen.kernels.rows import column_totals, softmax, total
from tests.codegen.triton.texts import TARGET, compiles, stages
from tests.fusion.schedule.test_contractions import Function, launches, scheduled


@compiles
@pytest.mark.parametrize("kernel", [total(1 << 20, 2048), column_totals(512, 40, 64)], ids=lambda kernel: kernel.name)
def test_the_last_program_goes_on(kernel: Kernel) -> None:
    artefacts = stages(kernel)
    assert artefacts["ttir"].count("tt.func public") == 1
    before, after = artefacts["ptx"].split("atom.global.gpu.acq_rel.add.u32")
    assert before.rindex("st.global") < before.rindex("bar.sync")
    assert "ld.global.cg" in after and "ld.global.cg" not in before
    assert stages(kernel, "gfx942")["hsaco"]


@compiles
def test_two_products_of_the_same_rows_are_one() -> None:
    """The matrix units process the columns of both at once, and no thread moves an operand."""
    artefacts = stages(gated(4096, 5632, 2048, turned=True))
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+)", artefacts["ptx"])) == {"m64n256"}
    assert "ldmatrix" not in artefacts["ptx"]
    text = TARGET.emit(gated(4096, 5632, 2048))
    assert text.count("tl.dot(") == 2  # stored the other way round, they stay two


@compiles
def test_independent_kernels_are_one_function_on_ranges_of_programs() -> None:
    kernel = packed("packed", add(5000), bias_gelu(7, 40, F16), add(3))
    text = TARGET.emit(kernel)
    assert re.search(r"return \(\d+ \+ \d+ \+ \d+,\)", text)
    assert stages(kernel)["ttir"].count("tt.func public") == 1
    assert stages(kernel, "gfx942")["hsaco"]


@compiles
def test_misaligned_rows_stay_one_per_program_in_a_launch_with_more_warps() -> None:
    odd, wide = softmax(2048, 50257, Role.LOOP, F16), softmax(64, 32768, Role.WHOLE, F16)
    text = TARGET.emit(packed("packed", odd, wide))
    assert '"num_warps": 32' in text and "r_shift = program % 8" in text
    assert stages(packed("packed", odd, wide))["cubin"]


@compiles
def test_persistent_parts_share_warps_and_stages() -> None:
    kernel = packed("packed", matmul(4096, 4096, 512, BF16, out=BF16), gated(4096, 1024, 512, turned=True))
    text = TARGET.emit(kernel)
    assert text.count("tl.range(program, ") == 2 and "if program" not in text
    assert set(re.findall(r"\.(m\d+n\d+)k16", stages(kernel)["ptx"])) == {"m64n256"}


def linears(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def packed_with_gated(
    x: torch.Tensor, q: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q), F.silu(F.linear(x, gate)) * F.linear(x, up)


def with_different_epilogues(
    x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q), torch.relu(F.linear(x, k)), torch.relu(F.linear(x, v))


def biased(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q, q[:, 0]), F.linear(x, k, k[:, 0]), F.linear(x, v, v[:, 0])


def launched(function: Function, *shapes: tuple[int, ...]) -> Kernel:
    """The only kernel of a program."""
    (call,) = launches(scheduled(function, *shapes))
    assert isinstance(call, KernelCall)
    return call.kernel


@compiles
@pytest.mark.parametrize("columns", [(1024, 1024, 1024), (2048, 512, 512)], ids=str)
def test_products_of_the_same_rows_are_one_loop(columns: tuple[int, int, int]) -> None:
    """It needs no second load and no barrier between them; their results are staged in one buffer in turn."""
    result = launched(linears, (8192, 1024), *((count, 1024) for count in columns))
    assert result.beside
    text = TARGET.emit(result)
    assert text.count("tl.range(") == text.count("tl.dot(") == 1 and text.count(" TensorDescriptor(") == 7
    compiled = compile_for(imported(result, text), H200)
    assert compiled.metadata.num_stages == 4
    ptx = compiled.asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 4 and "st.local" not in ptx
    assert set(re.findall(r"\.(m\d+n\d+)k16", ptx)) == {"m64n256"}


def of_any_rows(kernel: Kernel, rows: int) -> Kernel:
    """`kernel` for another number of rows at each call."""
    size = sympy.Symbol("s0", integer=True, positive=True)
    axes = tuple(replace(axis, size=axis.size.subs(rows, size)) for axis in kernel.axes)
    shapes = [tuple(size if length == rows else length for length in param.shape) for param in kernel.params]
    params = tuple(replace(param, shape=shape) for param, shape in zip(kernel.params, shapes, strict=True))
    beside = tuple(of_any_rows(part, rows) for part in kernel.beside)
    return replace(kernel, axes=axes, params=params, sizes=(size,), beside=beside)


@compiles
def test_the_rows_of_one_loop_may_be_of_any_number() -> None:
    kernel = of_any_rows(launched(linears, (8192, 1024), (2048, 1024), (512, 1024), (512, 1024)), 8192)
    text = TARGET.emit(kernel)
    assert text.count("tl.range(") == 1 and "def grid(s0, processors=132):" in text
    assert compile_for(imported(kernel, text), H200, (False,)).metadata.num_stages >= 3


@pytest.mark.parametrize("function", [packed_with_gated, with_different_epilogues], ids=lambda f: f.__name__)
def test_products_with_different_epilogues_are_not_joined(function: Function) -> None:
    text = TARGET.emit(launched(function, (8192, 1024), (2048, 1024), (512, 1024), (512, 1024)))
    assert text.count("tl.range(program, ") == 2


def test_products_whose_epilogues_load_rows_are_one_loop_of_groups_in_turn() -> None:
    """One group of warps cannot: a branch after the sum would make each step of it wait for the one before."""
    text = TARGET.emit(launched(biased, (8192, 1024), (2048, 1024), (512, 1024), (512, 1024)))
    assert text.count("_multiply_in_turn(left") == 1 and text.count(" TensorDescriptor(") == 7


def test_parts_without_promises_are_emitted_anew() -> None:
    kernel = packed("packed", matmul(4096, 4096, 512, BF16), gated(4096, 1024, 512, turned=True))
    text = TARGET.emit(unaligned(kernel))
    assert "_desc" not in text and text.count("tl.dot(") == 3


def test_only_kernels_of_like_needs_share_a_launch() -> None:
    products = [matmul(4096, 4096, 512, BF16), matmul(4096, 1024, 512, BF16), matmul(40, 35, 33, BF16)]
    assert TARGET.can_share_launch(products[0], products[1])
    assert not TARGET.can_share_launch(products[0], products[2])
    assert not TARGET.can_share_launch(products[0], add(1 << 20))
    assert TARGET.can_share_launch(add(1 << 20), add(70))
    assert not TARGET.can_share_launch(add(70), softmax(50, 300, Role.WHOLE))
    assert TARGET.can_share_launch(softmax(5000, 300, Role.WHOLE), softmax(5000, 500, Role.WHOLE))
    assert not TARGET.can_share_launch(softmax(5000, 300, Role.WHOLE), softmax(5000, 16384, Role.WHOLE))


def test_a_following_kernel_loops_where_its_warps_cannot_hold_the_row() -> None:
    long = TARGET.emit(total(1 << 20, 8192))
    assert '"num_warps": 4' in long and "for r0 in" in long
    assert "for r0 in" not in TARGET.emit(total(1 << 20, 1024))
    columns = TARGET.emit(column_totals(1 << 12, 40, 512))
    assert re.findall(r"for \w+ in", columns) == ["for r0 in"]


@compiles
def test_a_pipeline_too_deep_for_the_shared_memory_is_shortened() -> None:
    kernel = matmul(1024, 1024, 1024, BF16)
    deep = Config((("m", 128), ("k", 128), ("n", 256)), num_warps=8, num_stages=6)
    assert stages(kernel, config=deep)["cubin"]
    with pytest.raises(BuildError, match="shared memory"):
        stages(kernel, config=Config((("m", 64), ("k", 1024), ("n", 64)), num_warps=8))
