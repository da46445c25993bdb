"""Products whose two groups of warps take turns: which kernels have this form, and that it is right."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import sympy
import torch

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.forms.alternating_product import AlternatingConfig
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.lowering.ir.expr import Cast, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Store
from tests.codegen.kernels.making import BF16, F16, F32, GRID, LOOP, expected, i, j, kernel, load, param, r, tensors
from tests.codegen.kernels.products import gated, matmul, residual, transposed
from tests.codegen.triton import gluon_threads

TARGET = TritonTarget("sm_90")
ROWS = sympy.Symbol("rows", integer=True, positive=True)


def linear(
    m: int | sympy.Expr,
    n: int,
    k: int,
    dtype: torch.dtype = BF16,
    *,
    turned: tuple[bool, bool] = (False, False),
    both: bool = False,
    results: torch.dtype | None = None,
) -> Kernel:
    """relu(a · bᵀ + bias), and with `both` the value below ReLU, too; `turned`: an operand is transposed in memory"""
    a = load("a", m * r + i if turned[0] else k * i + r, dtype)
    b = load("b", n * r + j if turned[1] else k * j + r, dtype)
    dot = Fold("acc", "dot", (a, b), (r,), F32, (i,), (j,))
    value = op("add", dot.ref, Cast(load("bias", j, dtype), F32))
    params = [
        param("a", dtype, *((k, m) if turned[0] else (m, k))),
        param("b", dtype, *((k, n) if turned[1] else (n, k))),
    ]
    params += [param("bias", dtype, n), param("out", results or dtype, m, n, written=True)]
    stores = [Store("out", n * i + j, Cast(op("maximum", value, const(0.0, F32)), results or dtype))]
    if both:
        params.append(param("below", dtype, m, n, written=True))
        stores.append(Store("below", n * i + j, Cast(value, dtype)))
    return kernel("linear", tuple(params), {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}, Loop((r,), (dot,)), *stores)


def in_turn(example: Kernel) -> AlternatingConfig:
    return next(each for each in TARGET.configs(example) if isinstance(each, AlternatingConfig))


TAKEN = {
    "plain": linear(8192, 3072, 768),
    "half": linear(8192, 3072, 768, F16),
    "columns in memory": linear(8192, 3072, 768, turned=(True, True)),
    "two results": linear(8192, 3072, 768, both=True),
    "odd rows": linear(8191, 3000, 776),
    "rows that are not known": linear(ROWS, 3072, 768),
}
LEFT = {
    "float32": matmul(8192, 3072, 768, F32),
    "a wide result": linear(8192, 3072, 768, results=F32),
    "several products": gated(8192, 3072, 768),
    "a tile is loaded": residual(8192, 3072, 768),
    "a batch": transposed(16, 512, 512, 512),
}


@pytest.mark.parametrize("name", TAKEN)
def test_large_products_are_computed_in_turn(name: str) -> None:
    config = TARGET.configs(TAKEN[name])[0]
    assert isinstance(config, AlternatingConfig) and config.num_stages == 5
    source = TARGET.emit(TAKEN[name], config)
    assert source.count("@gluon.jit") == 3 and "tl.arange(" not in source
    assert source.count("gl.NVMMASharedLayout") == (4 if name == "two results" else 3), "one for each matrix"


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_to_one_group(name: str) -> None:
    assert not any(isinstance(config, AlternatingConfig) for config in TARGET.configs(LEFT[name]))


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_other_architectures_have_no_groups(arch: str) -> None:
    assert not any(isinstance(each, AlternatingConfig) for each in TritonTarget(arch).configs(TAKEN["plain"]))


def test_few_blocks_are_left_to_smaller_ones() -> None:
    """One block for each multiprocessor: a second group would have none."""
    first, *others = TARGET.configs(linear(1024, 1024, 768))
    assert isinstance(first, PersistentConfig) and any(isinstance(each, AlternatingConfig) for each in others)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("k", [64, 200, 704])
def test_threads_agree_with_the_evaluator(turned: tuple[bool, bool], k: int) -> None:
    """Fewer steps than slots, a last step that is not full, and more; nine blocks on two programs."""
    assert_same(linear(384, 384, k, turned=turned))


@pytest.mark.parametrize(("m", "n"), [(300, 392), (129, 136), (1000, 128)])
@pytest.mark.parametrize("both", [False, True])
def test_sides_that_are_not_multiples_of_blocks(m: int, n: int, both: bool) -> None:
    assert_same(linear(m, n, 136, F16, both=both))


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_any_number_of_programs(programs: int) -> None:
    assert_same(linear(640, 256, 192), programs=programs)


def test_rows_that_are_not_known() -> None:
    assert_same(linear(ROWS, 256, 200), sizes={ROWS: 333})


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("hopper.mbarrier.wait(turns.index(group), turn)", "pass"),
        ("hopper.mbarrier.arrive(turns.index(1 - group), count=1)", "pass"),
        ("hopper.mbarrier.arrive(emptied.index(behind), count=1)", "pass"),
        (
            "hopper.mbarrier.arrive(emptied.index(behind), count=1)",
            "hopper.mbarrier.arrive(emptied.index(slot), count=1)",
        ),
        ("sums = hopper.warpgroup_mma_wait(0, deps=(sums,))", "sums = hopper.warpgroup_mma_wait(1, deps=(sums,))"),
    ],
)
def test_threads_notice_a_wait_or_a_message_that_is_missing(
    line: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_threads, "PATIENCE", 1.0)
    example = linear(640, 384, 704)
    source = TARGET.emit(example, in_turn(example))
    assert line in source
    with pytest.raises((AssertionError, TypeError)):
        assert_same(example, source.replace(line, instead))


@pytest.mark.parametrize("name", ["plain", "columns in memory", "two results", "rows that are not known"])
def test_it_compiles_without_a_device(name: str) -> None:
    example = TAKEN[name]
    stages = dict(TARGET.stages(example, TARGET.emit(example, in_turn(example)), "sm_90"))
    ptx, sass = str(stages["ptx"]), str(stages["sass"])
    assert "setmaxnreg.inc" in ptx and "wgmma.wait_group.sync.aligned 1;" in ptx
    messages = ptx.count("cp.async.bulk.tensor.2d.shared")
    assert messages == (4 if name == "columns in memory" else 2), "a row of a message has 64 elements"
    assert sass.count("HGMMA.64x128x16") == 32, "of each group: the first products of a block, and its loop"
    assert "STL" not in sass, "nothing is spilled"


def assert_same(
    example: Kernel, source: str | None = None, *, sizes: dict[sympy.Symbol, int] | None = None, programs: int = 2
) -> None:
    args = tensors(example, sizes=sizes)
    given = [(sizes or {})[size] for size in example.sizes]
    want = expected(example, args, given)
    gluon_threads.run(example, source or TARGET.emit(example, in_turn(example)), args, programs, given)
    near = 2e-3 if args[-1].dtype is torch.float16 else 1.6e-2
    for got, right in zip(args[3:], want[3:], strict=True):
        torch.testing.assert_close(got, right, rtol=near, atol=near, equal_nan=True)
