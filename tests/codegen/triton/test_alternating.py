"""Products whose two groups of warps take turns: which kernels have this form, and that it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import sympy
import torch

from fusion.codegen.numerics import Numerics
from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.devices import H200
from fusion.codegen.triton.forms import Task, candidates
from fusion.codegen.triton.forms.alternating_product import AlternatingConfig
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.codegen.triton.forms.side_by_side.alternating import JoinedAlternatingProducts, joined
from fusion.codegen.triton.writer import Writer
from fusion.lowering.ir.expr import Cast, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Store, rename
from tests.codegen.kernels.making import BF16, F16, F32, GRID, LOOP, expected, i, j, kernel, load, param, r, tensors
from tests.codegen.kernels.products import gated, matmul, transposed
from tests.codegen.triton import gluon_threads
from tests.codegen.triton.test_persistent import activated, gelu, graded

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
    tile: bool = False,
) -> Kernel:
    """relu(a · bᵀ + bias), and with `both` the value below ReLU, too.

    `turned`: an operand is transposed in memory; `tile`: plus a matrix like the result.
    """
    a = load("a", m * r + i if turned[0] else k * i + r, dtype)
    b = load("b", n * r + j if turned[1] else k * j + r, dtype)
    dot = Fold("acc", "dot", (a, b), (r,), F32, (i,), (j,))
    value = op("add", dot.ref, Cast(load("bias", j, dtype), F32))
    if tile:
        value = op("add", value, Cast(load("c", n * i + j, dtype), F32))
    left, right = (k, m) if turned[0] else (m, k), (k, n) if turned[1] else (n, k)
    params = [param("a", dtype, *left), param("b", dtype, *right), param("bias", dtype, n)]
    params += [param("c", dtype, m, n)] if tile else []
    params.append(param("out", results or dtype, m, n, written=True))
    stores = [Store("out", n * i + j, Cast(op("maximum", value, const(0.0, F32)), results or dtype))]
    if both:
        params.append(param("below", dtype, m, n, written=True))
        stores.append(Store("below", n * i + j, Cast(value, dtype)))
    return kernel("linear", tuple(params), {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}, Loop((r,), (dot,)), *stores)


def columns(m: int, n: int, k: int) -> Kernel:
    """(a · bᵀ)ᵀ"""
    dot = Fold("acc", "dot", (load("a", k * i + r, BF16), load("b", k * j + r, BF16)), (r,), F32, (i,), (j,))
    params = (param("a", BF16, m, k), param("b", BF16, n, k), param("out", BF16, n, m, written=True))
    store = Store("out", m * j + i, Cast(dot.ref, BF16))
    return kernel("columns", params, {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}, Loop((r,), (dot,)), store)


def with_two_tiles(m: int, n: int, k: int) -> Kernel:
    """(a · bᵀ) · c + d"""
    dot = Fold("acc", "dot", (load("a", k * i + r, BF16), load("b", k * j + r, BF16)), (r,), F32, (i,), (j,))
    c, d = (Cast(load(name, n * i + j, BF16), F32) for name in ("c", "d"))
    params = [param("a", BF16, m, k), param("b", BF16, n, k), param("c", BF16, m, n), param("d", BF16, m, n)]
    store = Store("out", n * i + j, Cast(op("add", op("mul", dot.ref, c), d), BF16))
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    return kernel("two_tiles", (*params, param("out", BF16, m, n, written=True)), axes, Loop((r,), (dot,)), store)


def gated_gradient(m: int, n: int, k: int) -> Kernel:
    """The gradients of silu(c) · d by c and d, with that of the product as a · bᵀ"""
    dot = Fold("acc", "dot", (load("a", k * i + r, BF16), load("b", k * j + r, BF16)), (r,), F32, (i,), (j,))
    c, d = (Cast(load(name, n * i + j, BF16), F32) for name in ("c", "d"))
    one = const(1.0, F32)
    share = op("truediv", one, op("add", one, op("exp", op("mul", c, const(-1.0, F32)))))
    slope = op("mul", share, op("add", one, op("mul", c, op("sub", one, share))))
    values = {"of_c": op("mul", op("mul", dot.ref, d), slope), "of_d": op("mul", dot.ref, op("mul", c, share))}
    params = [param("a", BF16, m, k), param("b", BF16, n, k), param("c", BF16, m, n), param("d", BF16, m, n)]
    params += [param(name, BF16, m, n, written=True) for name in values]
    stores = [Store(name, n * i + j, Cast(value, BF16)) for name, value in values.items()]
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    return kernel("gated_gradient", tuple(params), axes, Loop((r,), (dot,)), *stores)


def with_many_tiles(m: int, n: int, k: int) -> Kernel:
    """(a · bᵀ) · c + d + e"""
    dot = Fold("acc", "dot", (load("a", k * i + r, BF16), load("b", k * j + r, BF16)), (r,), F32, (i,), (j,))
    c, d, e = (Cast(load(name, n * i + j, BF16), F32) for name in ("c", "d", "e"))
    params = [param("a", BF16, m, k), param("b", BF16, n, k), *(param(name, BF16, m, n) for name in ("c", "d", "e"))]
    store = Store("out", n * i + j, Cast(op("add", op("add", op("mul", dot.ref, c), d), e), BF16))
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    return kernel("many_tiles", (*params, param("out", BF16, m, n, written=True)), axes, Loop((r,), (dot,)), store)


def in_turn(example: Kernel) -> AlternatingConfig:
    return next(each for each in TARGET.configs(example) if isinstance(each, AlternatingConfig))


TAKEN = {
    "plain": linear(8192, 3072, 768),
    "half": linear(8192, 3072, 768, F16),
    "columns in memory": linear(8192, 3072, 768, turned=(True, True)),
    "two results": linear(8192, 3072, 768, both=True),
    "odd rows": linear(8191, 3000, 776),
    "rows that are not known": linear(ROWS, 3072, 768),
    "a wide result": linear(8192, 3072, 768, results=F32),
    "rows that are not aligned": linear(8192, 3001, 768),
    "a tile is loaded": linear(8192, 3072, 768, tile=True),
    "two tiles": with_two_tiles(8192, 3072, 768),
    "two tiles and two results": gated_gradient(8192, 3072, 768),
}
LEFT = {
    "float32": matmul(8192, 3072, 768, F32),
    "several products": gated(8192, 3072, 768),
    "a wide result of odd rows": linear(8192, 3001, 768, results=F32),
    "a result in columns": columns(8192, 3072, 768),
    "a tile of odd rows": linear(8192, 3001, 768, tile=True),
    "many tiles": with_many_tiles(8192, 3072, 768),
    "a batch": transposed(16, 512, 512, 512),
}


@pytest.mark.parametrize("name", TAKEN)
def test_matrices_move_through_shared_memory(name: str) -> None:
    config = in_turn(TAKEN[name])
    assert config.num_stages == (7 if name == "a wide result" else 5), "blocks that leave take the room of two"
    source = TARGET.emit(TAKEN[name], config)
    assert source.count("@gluon.jit") == 3 and "tl.arange(" not in source
    further = {"two results": 1, "a tile is loaded": 1, "a wide result": -1}
    further |= {"two tiles": 2, "two tiles and two results": 3}
    assert source.count("gl.NVMMASharedLayout") == 3 + further.get(name, 0)


FASTER = {
    "an expensive epilogue": activated(8192, 3072, 768, smooth=True),
    "a long sum": activated(8192, 4096, 4096, smooth=False),
    "two results": TAKEN["two results"],
    "a wide result": TAKEN["a wide result"],
}


def test_more_warps_finish_long_epilogues_sooner() -> None:
    """H200, the gradient of a GELU: groups of four warps 77.4 µs, of eight 70.3; a ReLU: 58.4 and 58.6."""
    factor = gelu(Cast(load("c", 3072 * i + j, BF16), F32))
    assert in_turn(graded(8192, 3072, 768, factor)).num_warps == 8
    assert in_turn(TAKEN["plain"]).num_warps == 4


@pytest.mark.parametrize("name", FASTER)
def test_groups_take_turns_where_that_is_faster(name: str) -> None:
    """H200, µs, in turn and the best of one group: 66.7 and 84.2; 402 and 411; 63.5 and 67.9; 105 and 112."""
    assert isinstance(TARGET.configs(FASTER[name])[0], AlternatingConfig)


def test_cheap_epilogues_of_short_sums_are_left_to_two_programs() -> None:
    """58.2 and 57.1 µs."""
    assert isinstance(TARGET.configs(TAKEN["plain"])[0], PersistentConfig)


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


@pytest.mark.parametrize(("m", "n"), [(300, 392), (129, 136), (1000, 128), (200, 301)])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("tile", [False, True])
def test_sides_that_are_not_multiples_of_blocks(m: int, n: int, both: bool, tile: bool) -> None:
    assert_same(linear(m, n, 136, F16, both=both, tile=tile and n % 8 == 0))


@pytest.mark.parametrize("n", [256, 296])
@pytest.mark.parametrize("tile", [False, True])
def test_wide_results(n: int, tile: bool) -> None:
    assert_same(linear(300, n, 200, results=F32, tile=tile))


def test_a_tile_arrives_while_its_block_is_multiplied() -> None:
    example = TAKEN["a tile is loaded"]
    source = TARGET.emit(example, in_turn(example))
    assert "tl.load(c_ptr" not in source and source.count("staged.load(SUMS)") == 1
    fetch, compute = (source.index(f"def linear_{part}(") for part in ("fetch", "compute"))
    assert "c_desc, [m0, n0]" in source[fetch:compute]


@pytest.mark.parametrize("make", [with_two_tiles, gated_gradient])
@pytest.mark.parametrize("late", [False, True])
def test_groups_use_the_memory_of_two_tiles_in_turn(
    make: Callable[[int, int, int], Kernel], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = make(640, 384, 64)
    source = TARGET.emit(example, in_turn(example))
    assert "tl.load(" not in source and "out = gl.allocate_shared_memory(tl.bfloat16, [2, " in source
    monkeypatch.setattr(gluon_threads, "LATE", late)
    for m, n, k in ((640, 384, 64), (300, 392, 136), (129, 136, 704)):
        for programs in (1, 2):
            assert_same(make(m, n, k), programs=programs)


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_any_number_of_programs(programs: int) -> None:
    assert_same(linear(640, 256, 192), programs=programs)


def test_rows_that_are_not_known() -> None:
    assert_same(linear(ROWS, 256, 200), sizes={ROWS: 333})


@pytest.mark.parametrize("late", [False, True])
def test_what_is_loaded_may_arrive_at_once_or_late(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_threads, "LATE", late)
    for k in (64, 704):
        assert_same(linear(640, 384, k, tile=True))


EMPTIED = "hopper.mbarrier.arrive(emptied.index({}), count=1)"
FAULTS = {
    "no turn": ("hopper.mbarrier.wait(turns.index(group), turn)", "pass"),
    "no turn for the other": ("hopper.mbarrier.arrive(turns.index(1 - group), count=1)", "pass"),
    "a slot that is kept": (EMPTIED.format("behind"), "pass"),
    "a slot that is released too early": (EMPTIED.format("behind"), EMPTIED.format("slot")),
    "sums that are still running": ("warpgroup_mma_wait(0, deps=(sums,))", "warpgroup_mma_wait(1, deps=(sums,))"),
    "a tile over a result": ("hopper.mbarrier.wait(vacant.index(group), turn)", "pass"),
    "a tile that has not arrived": ("hopper.mbarrier.wait(arrived.index(group), arrival)", "pass"),
    "memory that is kept": ("hopper.mbarrier.arrive(vacant.index(group), count=1)", "pass"),
}


OF_TWO_TILES = {
    "tiles over results of the other group": ("hopper.mbarrier.wait(vacant.index(1 - group), turn)", "pass"),
    "tiles behind results of the own group": ("vacant.index(1 - group)", "vacant.index(group)"),
    "tiles that have not arrived": ("hopper.mbarrier.wait(arrived.index(group), arrival)", "pass"),
}


@pytest.mark.parametrize("fault", [*FAULTS, *OF_TWO_TILES])
def test_threads_notice_a_wait_or_a_message_that_is_missing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_threads, "PATIENCE", 1.0)
    monkeypatch.setattr(gluon_threads, "LATE", "not arrived" in fault)
    line, instead = (FAULTS | OF_TWO_TILES)[fault]
    example = linear(640, 384, 64 if fault == "a tile over a result" else 704, tile=True)
    if fault in OF_TWO_TILES:
        example = with_two_tiles(640, 384, 64)
    source = TARGET.emit(example, in_turn(example))
    assert line in source
    with pytest.raises((AssertionError, TypeError)):
        assert_same(example, source.replace(line, instead))


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "columns in memory", "two results", "rows that are not known", "a wide result", "a tile is loaded"),
        "two tiles",
    ],
)
def test_it_compiles_without_a_device(name: str) -> None:
    example = TAKEN[name]
    stages = dict(TARGET.stages(example, TARGET.emit(example, in_turn(example)), "sm_90"))
    ptx, sass = str(stages["ptx"]), str(stages["sass"])
    assert "setmaxnreg.inc" in ptx and "wgmma.wait_group.sync.aligned 1;" in ptx
    messages = {"columns in memory": 4, "a tile is loaded": 4, "two tiles": 6}.get(name, 2)
    assert ptx.count("cp.async.bulk.tensor.2d.shared") == messages, "a row of a message has 64 elements"
    assert sass.count("HGMMA.64x128x16") == 32, "of each group: the first products of a block, and its loop"
    assert sass.count("STL ") <= (12 if name == "two tiles" else 0), "little or nothing is spilled, once a block"


def assert_same(
    example: Kernel, source: str | None = None, *, sizes: dict[sympy.Symbol, int] | None = None, programs: int = 2
) -> None:
    args = tensors(example, sizes=sizes)
    given = [(sizes or {})[size] for size in example.sizes]
    want = expected(example, args, given)
    gluon_threads.run(example, source or TARGET.emit(example, in_turn(example)), args, programs, given)
    near = 2e-3 if args[-1].dtype is torch.float16 else 1.6e-2
    for got, right in zip(args, want, strict=True):
        torch.testing.assert_close(got, right, rtol=near, atol=near, equal_nan=True)


# Products of the same rows --------------------------------------------------------------------------------------------


def projections(m: int, k: int, *columns: int, dtype: torch.dtype = BF16) -> Kernel:
    """Linear layers of one matrix with biases, in one launch."""
    parts = []
    for number, n in enumerate(columns):
        part = linear(m, n, k, dtype)
        names = {param.name: f"{param.name}_{number}" for param in part.params[1:]}
        params = tuple(replace(param, name=names.get(param.name, param.name)) for param in part.params)
        parts.append(replace(part, params=params, body=rename(part.body, names)))
    params = dict.fromkeys(param for part in parts for param in part.params)
    ordered = sorted(params, key=lambda param: param.written)
    return replace(parts[0], name="projections", params=tuple(ordered), beside=tuple(parts[1:]))


def joined_source(example: Kernel) -> str:
    task = Task(example, H200, Numerics())
    plan = JoinedAlternatingProducts(task, tuple(replace(part, beside=()) for part in example.parts))
    source = plan.emit(plan.configs()[0], Writer(H200, task.numerics, within_limit=False))
    assert source is not None
    return source


@pytest.mark.parametrize("columns", [(768, 768, 768), (4096, 1024, 1024)], ids=str)
def test_products_of_the_same_rows_are_one_loop(columns: tuple[int, ...]) -> None:
    example = projections(8192, 768, *columns)
    form, _ = candidates(Task(example, H200, Numerics()))[0]
    assert isinstance(form, JoinedAlternatingProducts)
    source = TARGET.emit(example)
    assert source.count(" TensorDescriptor(") == 7 and source.count("_multiply_in_turn(left") == 1
    assert "bias_0_ptr = bias_2_ptr" not in source and source.count(" = bias_2_ptr") == 1


@pytest.mark.parametrize("columns", [(768, 768, 700), (768, 3072)], ids=str)
def test_columns_past_the_end_of_one_product_alone_keep_them_apart(columns: tuple[int, ...]) -> None:
    tasks = [Task(part, H200, Numerics()) for part in projections(8192, 768, *columns).parts]
    kernels = [replace(task.kernel, beside=()) for task in tasks]
    assert bool(joined(tasks[0], kernels)) is (700 not in columns)


@pytest.mark.parametrize("columns", [(128, 256, 128), (136, 136), (384, 128)], ids=str)
@pytest.mark.parametrize("programs", [2, 3])
def test_threads_agree_on_products_of_the_same_rows(columns: tuple[int, ...], programs: int) -> None:
    example = projections(300, 136, *columns)
    args = tensors(example)
    want = expected(example, args)
    gluon_threads.run(example, joined_source(example), args, programs)
    for each, got, right in zip(example.params, args, want, strict=True):
        assert not each.written or torch.allclose(got.float(), right.float(), rtol=1.6e-2, atol=1.6e-2)


def test_products_of_the_same_rows_compile_without_a_device() -> None:
    example = projections(8192, 768, 768, 768, 768)
    stages = dict(TARGET.stages(example, TARGET.emit(example), "sm_90"))
    assert str(stages["sass"]).count("HGMMA.64x128x16") == 32 and "STL" not in str(stages["sass"])
