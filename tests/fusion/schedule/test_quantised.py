"""Linear layers with quantised weights or few rows: their kernels, and errors no larger than eager's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusion import fuse
from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.devices import device_of
from fusion.codegen.triton.rewrites.packed import unpacked
from fusion.codegen.triton.rewrites.totals import total_of
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.algebra.hoist import hoist
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.indexing import FloorDiv, axis_symbol, over_symbol
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.expr import Cast, Expr, Load, Op, const, loads, make_cast
from fusion.lowering.ir.kernel import Fold, Kernel, Role, Store, statements
from fusion.lowering.ir.program import Extern
from fusion.lowering.verify import verify_kernel
from fusion.schedule.kernels import KernelCall
from tests.codegen.kernels.products import linear
from tests.codegen.triton.blocking import block

Linear = Callable[..., torch.Tensor]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def per_channel(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ (w.to(x.dtype) * scale[:, None]).T


def after(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.to(x.dtype)) * scale


def divided(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.to(x.dtype) / scale[:, None])


def in_groups(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, groups = scale.shape
    return F.linear(x, (w.to(x.dtype).view(rows, groups, -1) * scale[..., None]).view(rows, -1))


def four_bits(w: torch.Tensor) -> torch.Tensor:
    return torch.stack((w & 15, w >> 4), -1).reshape(w.shape[0], -1).to(torch.int8) - 8


def packed(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return per_channel(x, four_bits(w), scale)


def packed_in_groups(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return in_groups(x, four_bits(w), scale)


LINEARS: Mapping[str, Linear] = {
    f.__name__: f for f in (per_channel, after, divided, in_groups, packed, packed_in_groups)
}


def inputs(linear: Linear, m: int, n: int, k: int, group: int = 128, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """x [m, k], stored weights of [n, k], scales."""
    x = torch.randn(m, k).to(dtype)
    grouped, stored_in_four = linear in (in_groups, packed_in_groups), linear in (packed, packed_in_groups)
    w = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if not stored_in_four:
        w = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = torch.rand((n, k // group) if grouped else (n,)).to(dtype) / 50 + 0.01
    return [x, w, scale]


def calls(function: Linear, *given: torch.Tensor) -> list[KernelCall | Extern]:
    """The steps of a schedule for an H200."""
    graph = make_fx(function, tracing_mode="fake", decomposition_table=decompositions())(*given)
    target = TritonTarget("sm_90")
    steps = schedule_graph(graph, target, Trace(None, "graph"))[1].steps
    return [step for step in steps if isinstance(step, KernelCall) or not step.is_view]


def only_kernel(function: Linear, *given: torch.Tensor) -> Kernel:
    (call,) = calls(function, *given)
    assert isinstance(call, KernelCall)
    return call.kernel


def folds(kernel: Kernel) -> list[Fold]:
    return [stmt for stmt in statements(kernel.body) if isinstance(stmt, Fold)]


def error(got: torch.Tensor, function: Linear, given: list[torch.Tensor]) -> float:
    """Against float64, relative to the size of the result."""
    want = function(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in given))
    return float((got.double() - want).norm() / want.norm())


# What is scheduled ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("name", LINEARS)
def test_one_kernel_reads_the_weight_as_it_is_stored(name: str, m: int) -> None:
    given = inputs(LINEARS[name], m, 16384, 1024)
    kernel = only_kernel(LINEARS[name], *given)
    weights = [param for param in kernel.params if param.dtype.itemsize == 1]
    assert [tuple(map(int, param.shape)) for param in weights] == [tuple(given[1].shape)]
    assert len(kernel.params) == 4


@pytest.mark.parametrize("name", ["per_channel", "after", "divided", "packed"])
def test_a_scale_per_channel_is_applied_to_the_sum(name: str) -> None:
    kernel = only_kernel(LINEARS[name], *inputs(LINEARS[name], 16, 4096, 4096))
    (fold,) = folds(kernel)
    assert {load.buffer for load in loads(*fold.args)} == {"in0", "in1"}


def test_many_rows_are_multiplied_apart_from_their_conversion_and_bytes_decide_for_few() -> None:
    converted, product = calls(per_channel, *inputs(per_channel, 4096, 4096, 4096))
    assert isinstance(converted, KernelCall) and not any(stmt.op == "dot" for stmt in folds(converted.kernel))
    assert isinstance(product, Extern) or torch.int8 not in {param.dtype for param in product.kernel.params}
    assert isinstance(calls(F.linear, torch.randn(64, 4096).to(BF16), torch.randn(4096, 4096).to(BF16))[0], Extern)
    assert folds(only_kernel(F.linear, torch.randn(1, 4096).to(BF16), torch.randn(4096, 4096).to(BF16)))


# Hoisting -------------------------------------------------------------------------------------------------------------

N, K = axis_symbol(0), over_symbol(0)
W, SCALE, GROUP = Load("w", (N, K), F32), Load("scale", (N,), F32), Load("group", (N, FloorDiv(K, 32)), F32)


def mul(a: Expr, b: Expr) -> Expr:
    return Op("mul", (a, b), a.dtype)


def test_factors_and_divisors_move_out_of_the_sum() -> None:
    half = const(0.5, F32)
    nested = Op("truediv", (mul(mul(half, W), GROUP), SCALE), F32)
    result = hoist([nested], [K])
    assert result.operands == (mul(W, GROUP),)
    assert result.scaled(W) == Op("truediv", (mul(W, half), SCALE), F32)


def test_a_sum_of_nothing_is_no_negative_zero() -> None:
    def scaled(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, w.to(x.dtype) * scale[:, None])

    x, w = torch.zeros(2, 64), torch.randint(-8, 8, (48, 64), dtype=torch.int8)
    scale = torch.linspace(-1, 1, 48)
    for target in ("reference", "c"):
        assert not fuse(scaled, options={"target": target, "strict": True})(x, w, scale).signbit().any()
    half = mul(W, const(0.5, F32))
    assert hoist([half], [K]).summed(W) == half  # whose sign is known


def test_factors_that_vary_along_the_sum_or_are_constant_stay() -> None:
    reciprocal = Op("truediv", (SCALE, W), F32)
    for operand in (W, GROUP, mul(W, GROUP), Op("add", (W, SCALE), F32), mul(SCALE, SCALE), reciprocal):
        result = hoist([operand], [K])
        assert result.operands == (operand,)
        assert result.scaled(W) is W


def test_common_factors_of_the_terms_move_out_of_a_sum() -> None:
    x, y = Load("x", (K,), F32), Load("y", (K,), F32)
    shared = Op("add", (mul(mul(W, SCALE), x), mul(mul(W, SCALE), y)), F32)
    assert hoist([shared], [K]).operands == (Op("add", (mul(W, x), mul(W, y)), F32),)
    other = Op("add", (mul(W, SCALE), y), F32)
    assert hoist([other], [K]).operands == (other,)


def test_a_factor_moves_through_a_rounding_only_where_the_rest_stays_in_range() -> None:
    byte = Cast(Load("w", (N, K), torch.int8), F32)
    result = hoist([Cast(mul(byte, SCALE), F16, True)], [K])
    assert result.operands[0].dtype is F16
    assert "scale" not in {load.buffer for load in loads(*result.operands)}
    large = Cast(mul(W, SCALE), F16, True)  # float32 that only its scale brings into the range of float16
    assert hoist([large], [K]).operands == (large,)
    brain = hoist([Cast(mul(W, SCALE), BF16, True)], [K])
    assert brain.operands[0].dtype is BF16
    assert len(brain.scales) == 1


# What the kernels compute ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 4, 5])
@pytest.mark.parametrize("name", LINEARS)
def test_blocked_kernels_compute_the_same(name: str, m: int) -> None:
    """The rewritten kernel is an ordinary one: the evaluator runs it, with an error not above eager's."""
    given = inputs(LINEARS[name], m, 96, 256)
    kernel = block(only_kernel(LINEARS[name], *given)).kernel
    verify_kernel(kernel)
    out = torch.empty(m, 96, dtype=BF16)
    run_kernel(kernel, [*given, out], [])
    assert error(out, LINEARS[name], given) <= 2 * error(LINEARS[name](*given), LINEARS[name], given)


def test_few_rows_are_sums_that_share_the_weight() -> None:
    """Up to four rows of 16-bit floats; of bytes one row, unless they are multiplied in float32."""
    result = folds(block(linear(4, 4096, 4096, BF16)).kernel)
    weights = [load for fold in result for load in loads(*fold.args) if load.buffer == "w"]
    assert {fold.op for fold in result} == {"sum"}
    assert len(weights) == 4
    assert len(set(weights)) == 1
    assert [fold.op for fold in folds(block(linear(6, 4096, 4096, BF16)).kernel)] == ["dot"]
    for m, dtype, form in ((1, BF16, "sum"), (2, BF16, "dot"), (2, F32, "sum")):
        given = inputs(per_channel, m, 16384, 1024, dtype=dtype)
        assert {fold.op for fold in folds(block(only_kernel(per_channel, *given)).kernel)} == {form}


@pytest.mark.parametrize(("m", "form"), [(1, ["sum"]), (2, ["dot"])])
def test_a_weight_that_is_contiguous_along_its_columns_is_summed_for_one_row(m: int, form: list[str]) -> None:
    def turned(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x @ (w.to(x.dtype) * scale)

    given = [
        torch.randn(m, 4096).to(BF16),
        torch.randint(-9, 9, (4096, 4096), dtype=torch.int8),
        torch.rand(4096).to(BF16),
    ]
    assert [fold.op for fold in folds(block(only_kernel(turned, *given)).kernel)] == form


def test_the_larger_operand_fills_the_rows_of_the_matrix_units() -> None:
    blocked = block(only_kernel(per_channel, *inputs(per_channel, 16, 16384, 4096)))
    sizes = {dim.name: int(dim.size) for dim in blocked.dims}
    assert sizes == {"m": 16384, "k": 4096, "n": 16}
    blocked = block(only_kernel(per_channel, *inputs(per_channel, 64, 4096, 4096)))
    assert {dim.name: int(dim.size) for dim in blocked.dims}["m"] == 64


def test_packed_weights_at_places_that_are_data_are_looped_over_in_storage_order() -> None:
    def chosen(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return packed(x, w[places], scale)

    x, w, scale = inputs(packed, 16, 16384, 1024)
    kernel = block(only_kernel(chosen, x, w, scale, torch.arange(16384))).kernel
    assert math.prod(int(axis.size) for axis in kernel.axes if axis.role is not Role.GRID) == 512


def test_packed_weights_are_looped_over_in_storage_order() -> None:
    for m, n, op, count in ((1, 8192, "sum", 1), (1, 16384, "dot", 2), (2, 8192, "dot", 2), (16, 16384, "dot", 2)):
        kernel = block(only_kernel(packed, *inputs(packed, m, n, 1024))).kernel
        results = [fold for fold in folds(kernel) if list(loads(*fold.args))]
        assert [fold.op for fold in results] == [op] * count
        assert math.prod(int(axis.size) for axis in kernel.axes if axis.role is not Role.GRID) == 512
        weights = {load for fold in results for load in loads(*fold.args) if load.buffer == "in1"}
        assert len(weights) == 1
        assert all(load.mask is None for load in weights)


@pytest.mark.parametrize("m", [1, 3, 16])
def test_packed_weights_with_few_long_rows_are_multiplied_in_parts_of_one_launch(m: int) -> None:
    kernel = only_kernel(packed_in_groups, *inputs(packed_in_groups, m, 4096, 14336))
    verify_kernel(kernel)
    assert [int(axis.size) for axis in kernel.awaited] == [4]
    assert [fold.op for fold in folds(block(kernel).kernel)] == ["dot", "dot", "sum"]
    source = TritonTarget("sm_90").emit(kernel)
    assert "tl.dot(" in source and "tl.atomic_add(counter + block, 1" in source


def test_interleaved_elements_are_one_load() -> None:
    for m in (1, 16):
        source = TritonTarget("sm_90").emit(only_kernel(packed, *inputs(packed, m, 16384, 4096)))
        assert source.count("tl.split(") == 1
        assert source.count("tl.load(") == 3  # x, weights, scales


def test_the_scale_of_a_group_is_loaded_once() -> None:
    kernel = block(only_kernel(in_groups, *inputs(in_groups, 1, 4096, 4096))).kernel
    assert [(int(axis.size), axis.role) for axis in kernel.axes[-2:]] == [(32, Role.LOOP), (128, Role.WHOLE)]
    part, total = folds(kernel)
    assert part.over == (kernel.axes[-1].symbol,)
    assert {load.buffer for load in loads(*part.args)} == {"in0", "in1"}
    assert {load.buffer for load in loads(*total.args)} == {"in2"}


def gated(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.silu(packed(x, a, scale)) * packed(x, b, scale)


def test_two_packed_weights_share_a_loop_on_the_matrix_units() -> None:
    """Each of them is looped over in blocks as long as if it were alone."""
    for m in (1, 16):
        x, w, scale = inputs(packed, m, 16384, 1024)
        kernel = only_kernel(gated, x, w, w.clone(), scale)
        assert [fold.op for fold in folds(block(kernel).kernel)] == ["dot"] * 4
        assert {config.block("k") for config in TritonTarget("sm_90").configs(kernel)[:2]} == {128}


def test_few_vectors_and_weights_of_bytes_take_half_as_many_columns() -> None:
    target = TritonTarget("sm_90")
    for m, columns in ((1, 8), (8, 8), (9, 16), (16, 16)):
        for function in (packed, packed_in_groups, *((per_channel, in_groups) if m > 1 else ())):
            kernel = only_kernel(function, *inputs(function, m, 16384, 1024))
            assert {config.block("n") for config in target.configs(kernel)} >= {columns}
            assert f'"NBLOCK": {columns}' in target.emit(kernel)


# What is generated ----------------------------------------------------------------------------------------------------


def test_source_takes_the_scale_of_a_group_once_per_block() -> None:
    source = TritonTarget("sm_90").emit(only_kernel(in_groups, *inputs(in_groups, 16, 4096, 4096)))
    assert "k0 // 128" in source
    assert "ki // 128" not in source


@pytest.mark.parametrize("function", [in_groups, packed_in_groups])
def test_source_scales_a_group_of_a_narrow_product_behind_its_sum(function: Linear) -> None:
    """Of numbers that share a byte the products are added first."""
    source = TritonTarget("sm_90").emit(only_kernel(function, *inputs(function, 16, 4096, 4096)))
    products = [line.split("= ")[1] for line in source.splitlines() if "tl.dot(" in line]
    assert len(products) == (2 if function is packed_in_groups else 1)
    assert all(product.startswith("tl.dot(") for product in products)
    assert [" * in2" in product for product in products] == [False] * (len(products) - 1) + [True]
    assert source.count("tl.zeros(") == 1


def test_only_products_that_nothing_else_needs_have_one_accumulator() -> None:
    kernel = unpacked(only_kernel(packed_in_groups, *inputs(packed_in_groups, 16, 4096, 4096)))
    first, second = folds(kernel)
    for fold in (first, second):
        total = total_of(kernel.body, fold)
        assert total is not None and total.folds == (first, second)
    *_, store = kernel.body
    assert isinstance(store, Store)
    assert total_of((*kernel.body, replace(store, value=make_cast(first.ref, BF16))), first) is None


@pytest.mark.parametrize(("linear", "group", "together"), [(in_groups, 64, 2), (in_groups, 128, 1)])
def test_steps_shorter_than_a_line_of_memory_are_taken_together(linear: Linear, group: int, together: int) -> None:
    """64 bytes of each row are half a cache line, of which the next step reads the other half."""
    target, kernel = TritonTarget("sm_90"), only_kernel(linear, *inputs(linear, 16, 16384, 4096, group))
    config = target.configs(kernel)[0]
    assert config.unrolled == together
    assert (f"KBLOCK, loop_unroll_factor={together})" in target.emit(kernel)) == (together > 1)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 16384, 4096), (16, 16384, 4096), (16, 4096, 14336)])
@pytest.mark.parametrize(("group", "shares"), [(64, 4), (128, 2), (256, 1)])
def test_groups_of_packed_weights_that_are_parts_of_a_line_are_shares(
    m: int, n: int, k: int, group: int, shares: int
) -> None:
    kernel = only_kernel(packed_in_groups, *inputs(packed_in_groups, m, n, k, group))
    if kernel.awaited and shares == 2:  # in parts: of two lines
        shares = 4
    blocked = block(kernel)
    verify_kernel(blocked.kernel)
    assert [int(dim.size) for dim in blocked.dims if dim.name == "s"] == [shares] * (shares > 1)
    source, config = TritonTarget("sm_90").emit(kernel), TritonTarget("sm_90").configs(kernel)[0]
    assert config.block("k") == min(128, group // 2)
    assert shares == 1 or config.num_warps == shares
    # What a group is scaled by is asked for a step before it is needed.
    assert ("in2_next = tl.load(in2_at + k_next" in source) == (shares > 1)
    assert all(dim.name != "s" for dim in block(kernel, device_of("gfx942")).dims)


@pytest.mark.parametrize("name", LINEARS)
def test_every_configuration_covers_the_groups(name: str) -> None:
    target = TritonTarget("sm_90")
    for m in (1, 16):
        kernel = only_kernel(LINEARS[name], *inputs(LINEARS[name], m, 4096, 4096))
        result = target.configs(kernel)
        assert len(set(result)) == len(result) > 1
        assert all(target.emit(kernel, config) for config in result)


def test_a_tail_keeps_the_contraction_as_it_is() -> None:
    kernel = only_kernel(per_channel, *inputs(per_channel, 1, 4096, 4096))
    followed = replace(kernel, then=replace(kernel, name="tail"))
    assert [fold.op for fold in folds(block(followed).kernel)] == ["dot"]
