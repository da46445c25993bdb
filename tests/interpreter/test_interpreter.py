"""Triton kernels under Triton's interpreter: the generated text itself, run with numpy, against the evaluator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch

from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.forms.chained import DescribedConfig
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.codegen.triton.launch.interpreted import complete
from fusion.codegen.triton.launch.load import Generated, load
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel, Role
from fusion.lowering.ir.scalar_ops import SCALAR_OPS
from tests.codegen.kernels.attention import attention_dkv, attention_dq, online_attention
from tests.codegen.kernels.making import assert_same, expected, packed, special, tensors
from tests.codegen.kernels.pointwise import add, convert, in_place, scalar
from tests.codegen.kernels.products import gated, matmul, matmul_in_parts, matmul_top
from tests.codegen.kernels.rows import (
    column_totals,
    fold,
    online_logsumexp,
    online_softmax,
    partial_sums,
    scattered,
    softmax,
    sums_of_half_the_channels,
    total,
    total_of_rows,
)
from tests.codegen.kernels.small import SMALL
from tests.codegen.triton.test_fields import converted, every_byte

TARGET = TritonTarget()
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def run(
    kernel: Kernel, given: list[torch.Tensor], *sizes: int, config: Config | None = None, wide: bool = False
) -> None:
    TARGET.build(kernel, TARGET.emit(kernel, config, wide=wide))(*given, *sizes)


@pytest.mark.parametrize("name", SMALL)
def test_kernel(name: str) -> None:
    kernel = SMALL[name]
    given = tensors(kernel)
    want = expected(kernel, given)
    run(kernel, given)
    assert_same(kernel, given, want)


@pytest.mark.parametrize("role", [Role.WHOLE, Role.LOOP])
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_nan_wins_and_then_the_lowest_index(name: str, role: Role) -> None:
    rows = torch.tensor(
        [
            [1.0, 5.0, 5.0, 0.0, 0.0],
            [1.0, float("nan"), 9.0, float("nan"), 0.0],
            [float("-inf")] * 5,
            [float("inf")] * 5,
            [float("nan")] * 5,
            [-0.0, 0.0, -0.0, 0.0, 0.0],
        ]
    )
    kernel = fold(name, 6, 5, role)
    out = torch.empty(6, dtype=kernel.params[1].dtype)
    run(kernel, [rows, out])
    torch.testing.assert_close(out, getattr(rows, name if name[:3] == "arg" else f"a{name}")(1), equal_nan=True)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in SCALAR_OPS if name != "checked"]
)  # refuses edge values: test_out_of_range
def test_scalar_op(name: str, dtype: torch.dtype) -> None:
    given = special(name, dtype, 256)
    kernel = scalar(name, dtype, 256)
    if given is None:
        pytest.skip("eager has no such operation")
    # Eager computes 16-bit floats in float32.
    wide = [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in given]
    want = SCALAR_OPS[name].meaning(*wide).to(kernel.params[-1].dtype)
    out = torch.empty_like(want)
    run(kernel, [*given, out])
    assert_same(kernel, [*given, out], [*given, want])
    if dtype.is_floating_point and name in ("neg", "abs", "sign", "floordiv", "trunc", "round", "mul"):
        known = ~want.isnan()
        assert torch.equal(out[known].signbit(), want[known].signbit())


@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS, torch.bool], ids=str)
@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_cast(source: torch.dtype, target: torch.dtype) -> None:
    (x,) = special("abs", source, 256) or [torch.rand(256) > 0.5]
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
        x = torch.where(x.isfinite() & (x.abs() < 100), x, 1)  # beyond that eager promises nothing
    out = torch.empty(256, dtype=target)
    run(convert(source, target, 256), [x, out])
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16], ids=str)
def test_float64_is_converted_to_16_bits_through_float32(target: torch.dtype) -> None:
    x = torch.tensor([65519.999, 1 + 2**-11 + 2**-40, 1 + 2**-8 + 2**-40, 2**-25 * 1.00000001], dtype=torch.float64)
    out = torch.zeros(4, dtype=target)
    run(convert(torch.float64, target, 4), [x, out])
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(5, 70), (16, 32), (1, 1)])
def test_symbolic_sizes(sizes: tuple[int, int]) -> None:
    rows, columns = sympy.symbols("s0 s1", integer=True, positive=True)
    known = {rows: sizes[0], columns: sizes[1]}
    small = {"add": None, "softmax": Config((("r", 64),)), "matmul": Config((("m", 16), ("k", 32), ("n", 32)))}
    for kernel in (add(rows), softmax(rows, columns, Role.LOOP), matmul(rows, 35, columns)):
        given = tensors(kernel, sizes=known)
        values = [known[size] for size in kernel.sizes]
        want = expected(kernel, given, values)
        for wide in (False, True):
            got = [tensor.clone() for tensor in given]
            run(kernel, got, *values, config=small[kernel.name], wide=wide)
            assert_same(kernel, got, want, factor=10)


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_descriptors(dtype: torch.dtype, turned: tuple[bool, bool]) -> None:
    kernel = matmul(40, 72, 80, dtype, turned=turned)
    given = tensors(kernel)
    want = expected(kernel, given)
    config = PersistentConfig((("m", 16), ("k", 32), ("n", 32)), num_stages=3)
    assert " TensorDescriptor(" in TARGET.emit(kernel, config)
    run(kernel, given, config=config)
    assert_same(kernel, given, want)


MANY_BLOCKS = Config((("m", 32), ("k", 16), ("n", 16), ("r", 16)))


@pytest.mark.parametrize("split", [False, True], ids=["one loop", "split"])
@pytest.mark.parametrize("sizes", [(90, 90), (40, 90), (90, 40)], ids=str)
@pytest.mark.parametrize("result", [online_attention, attention_dkv, attention_dq])
def test_causal_loops_of_many_blocks(result: Callable[..., Kernel], sizes: tuple[int, int], split: bool) -> None:
    kernel = result(2, *sizes, 16, causal=True)
    given = tensors(kernel)
    want = expected(kernel, given)
    for config in (MANY_BLOCKS, DescribedConfig(MANY_BLOCKS.blocks)):
        got = [tensor.clone() for tensor in given]
        run(kernel, got, config=replace(config, split=split))
        assert_same(kernel, got, want)


@pytest.mark.parametrize("split", [False, True], ids=["one loop", "split"])
@pytest.mark.parametrize(
    "limits",
    [{"window": 20}, {"window": 1}, {"causal": True, "window": 50, "prefix": 35}, {"prefix": 70}],
    ids=lambda limits: " ".join(limits),
)
def test_loops_that_skip_blocks(limits: dict[str, int], split: bool) -> None:
    kernel = online_attention(1, 150, 150, 12, **limits)
    given = tensors(kernel)
    want = expected(kernel, given)
    run(kernel, given, config=replace(MANY_BLOCKS, split=split))
    assert_same(kernel, given, want)


def test_skipped_blocks_are_not_read() -> None:
    kernel = online_attention(1, 128, 128, 16, causal=True, window=10)
    query, key, value, out = tensors(kernel)
    value[:, 32:64] = float("nan")
    run(kernel, [query, key, value, out], config=MANY_BLOCKS)
    seen = out.isfinite().all(-1)[0]
    assert seen[:32].all() and seen[96:].all() and not seen[32:64].any()


@pytest.mark.parametrize("rows", [1, 8])
def test_sums_that_skip(rows: int) -> None:
    kernel = partial_sums(70, 90, 9)
    given = tensors(kernel)
    want = expected(kernel, given)
    run(kernel, given, config=Config((("x", rows), ("r", 4))))
    assert_same(kernel, given, want)


def test_running_folds_of_many_blocks() -> None:
    for name in ("running_folds", "online_logsumexp"):
        kernel = SMALL[name]
        given = tensors(kernel)
        want = expected(kernel, given)
        run(kernel, given, config=Config((("x", 2), ("r", 4 if name == "running_folds" else 256))))
        assert_same(kernel, given, want)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("columns", [700, 2048, 5000])
def test_each_thread_keeps_its_own_running_values_of_a_row(columns: int, split: bool) -> None:
    kernel = online_logsumexp(6, columns)
    x, out = tensors(kernel)
    x[1, : columns // 2] = -torch.inf
    x[2], x[3, -1], x[4, 7] = -torch.inf, torch.inf, torch.nan
    given, config = [x, out], Config((("r", 1024),), num_warps=4, split=split)
    assert "_by_lane(" in TARGET.emit(kernel, config)
    want = expected(kernel, given)
    run(kernel, given, config=config)
    assert_same(kernel, given, want)


@pytest.mark.parametrize(
    "result",
    [
        online_softmax,
        lambda rows, columns: online_softmax(rows, columns - 3, apart=columns),  # its end lies within a word
        lambda rows, columns: softmax(rows, columns, Role.LOOP),
    ],
)
@pytest.mark.parametrize("columns", [700, 2048, 5000])
def test_a_second_loop_over_a_row_runs_backwards(columns: int, result: Callable[[int, int], Kernel]) -> None:
    kernel = result(3, columns)
    given, config = tensors(kernel), Config((("r", 512),), num_warps=4, split=True)
    assert "r0 = " in TARGET.emit(kernel, config)
    want = expected(kernel, given)
    run(kernel, given, config=config)
    assert_same(kernel, given, want)


def test_every_configuration_gives_the_same() -> None:
    chains = (online_attention(2, 40, 200, 24, causal=True), attention_dkv(1, 40, 150, 24))
    for kernel in (SMALL["softmax f16"], SMALL["gated"], SMALL["bias_gelu bf16"], SMALL["matmul float32 00"], *chains):
        given = tensors(kernel)
        want = expected(kernel, given)
        for config in TARGET.configs(kernel):
            got = [tensor.clone() for tensor in given]
            run(kernel, got, config=config)
            assert_same(kernel, got, want)


def completed(kernel: Kernel, source: str) -> Generated:
    generated = load(kernel, source)
    complete(generated.module)
    return generated


def test_the_last_program_goes_on_and_leaves_the_counter_at_zero() -> None:
    for kernel in (total(4096, 1024), column_totals(1024, 20, 256)):  # too long for one warp: looped over
        given = tensors(kernel)
        want = expected(kernel, given)
        source = TARGET.emit(kernel, Config((("r", 4), ("x", 1)), num_warps=1))
        assert "for " in source
        generated, counter = completed(kernel, source), torch.zeros((), dtype=torch.int32)
        for _ in range(2):
            generated.function[(generated.grid(),)](*given, counter, **generated.constants, **generated.options)
            assert_same(kernel, given, want)
            assert int(counter) == 0


def test_a_persistent_or_symbolic_grid_has_a_last_program() -> None:
    config = PersistentConfig((("m", 16), ("k", 32), ("n", 32)), per_processor=2)
    rows = sympy.Symbol("s0", integer=True, positive=True)
    for kernel, sizes, chosen in ((matmul_top(40, 72, 80), [], config), (total_of_rows(rows, 8), [5], None)):
        given = tensors(kernel, sizes=dict(zip(kernel.sizes, sizes, strict=True)))
        want = expected(kernel, given, sizes)
        run(kernel, given, *sizes, config=chosen)
        assert_same(kernel, given, want)


@pytest.mark.parametrize(("m", "n", "k", "parts"), [(3, 200, 256, 4), (16, 64, 96, 3), (40, 33, 64, 2)])
def test_the_last_program_of_a_tile_goes_on_with_it(m: int, n: int, k: int, parts: int) -> None:
    """Whichever of its programs is last; counts are 0 again for the next launch."""
    kernel = matmul_in_parts(m, n, k, parts)
    generated = completed(kernel, TARGET.emit(kernel))
    assert generated.counters * parts == generated.grid()
    counter = torch.zeros(generated.counters, dtype=torch.int32)
    given = tensors(kernel)
    want = expected(kernel, given)
    for _ in range(2):
        given[2].fill_(torch.nan)
        given[3].fill_(torch.nan)
        generated.function[(generated.grid(),)](*given, counter, **generated.constants, **generated.options)
        assert_same(kernel, given, want, factor=3.0)
        assert not counter.any()


def test_parts_of_symbolic_size_share_a_grid() -> None:
    rows, columns = sympy.symbols("s0 s1", integer=True, positive=True)
    kernel = packed("packed", add(rows), add(columns), add(700))
    for sizes in ((1, 5000), (1024, 3)):
        given = tensors(kernel, sizes=dict(zip((rows, columns), sizes, strict=True)))
        want = expected(kernel, given, sizes)
        run(kernel, given, *sizes)
        assert_same(kernel, given, want)


@pytest.mark.parametrize("programs", [1, 7, 30, 64])
def test_persistent_parts_go_on_where_the_part_before_ended(programs: int) -> None:
    one, other = matmul(640, 1024, 128, out=torch.float16), matmul(1024, 640, 192, turned=(True, False))
    kernel = packed("packed", one, gated(600, 1024, 128, turned=True), other)
    given = tensors(kernel)
    want = expected(kernel, given)
    source = TARGET.emit(kernel)
    assert source.count("tl.range(program, ") == 3
    generated = completed(kernel, source)
    generated.function[(programs,)](*given, **generated.constants, **generated.options)
    assert_same(kernel, given, want)


def test_unaligned_and_aliased_tensors() -> None:
    kernel = in_place(100)
    memory = torch.randn(303)
    given = [memory[1:101], memory[101:201], memory[203:303]]
    want = [given[0] + given[1], given[1].clone(), (given[0] + given[1]) * 2]
    run(kernel, given)
    for a, b in zip(given, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_colliding_sources(name: str, dtype: torch.dtype) -> None:
    for role in (Role.GRID, Role.LOOP):
        kernel = scattered(name, 300, 5, 7, dtype, role)
        given = tensors(kernel)
        if dtype.is_floating_point:
            given[0][::50, 1], given[0][7::50, 2] = torch.nan, -torch.nan
        want = expected(kernel, given)
        run(kernel, given)
        assert_same(kernel, given, want, factor=20.0)


def test_sources_that_are_stored() -> None:
    kernel = scattered("store", 3, 5, 7, torch.bfloat16)
    given = tensors(kernel)
    given[1].copy_(torch.tensor([2, 4, 0]))
    want = given[2].clone()
    want[[2, 0]] = given[0][[0, 2]]
    run(kernel, given)
    assert torch.equal(given[2], want)


def test_empty_grid_and_empty_fold() -> None:
    run(add(0), [torch.empty(0), torch.empty(0), torch.empty(0)])
    for role in (Role.WHOLE, Role.LOOP):
        out = torch.full((3,), 7.0)
        run(fold("sum", 3, 0, role), [torch.empty(3, 0), out])
        assert torch.equal(out, torch.zeros(3))


@pytest.mark.parametrize(("channels", "size"), [(0, 0), (0, 5), (4, 0)])
def test_fold_over_two_axes_of_which_one_is_empty(channels: int, size: int) -> None:
    kernel = sums_of_half_the_channels(3, channels, size)
    out = torch.full((3, 2), 7.0)
    run(kernel, [torch.empty(3, channels, size), out])
    assert torch.equal(out, torch.zeros(3, 2))


def test_an_edited_source_runs_as_edited() -> None:
    kernel = add(100)
    source = TARGET.emit(kernel).replace("x + y", "x - y")
    x, y, out = tensors(kernel)
    TARGET.build(kernel, source)(x, y, out)
    torch.testing.assert_close(out, x - y)


def test_interpreting_excludes_compiling() -> None:
    kernel = add(100)
    with pytest.raises(BuildError, match="TRITON_INTERPRET"):
        list(TARGET.stages(kernel, TARGET.emit(kernel)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("source", [torch.uint8, torch.int8], ids=str)
def test_bits_of_every_byte(source: torch.dtype, dtype: torch.dtype) -> None:
    kernel = converted(source, dtype, 263)
    given = every_byte(source, kernel)
    want = expected(kernel, given)
    run(kernel, given)
    assert "_bits_to_" in TARGET.emit(kernel)
    assert all(torch.equal(got, exact) for got, exact in zip(given, want, strict=True))
