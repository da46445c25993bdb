"""Expressions and folds against torch, and evaluation errors."""

from __future__ import annotations

import math

import pytest
import sympy
import torch

from fusion.lowering.errors import VerifyError
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.interpret.evaluate import Scope, boxes, evaluate
from fusion.lowering.interpret.folds import fold
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, Random, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.scalar_ops import SCALAR_OPS, result_dtype
from fusion.lowering.random import philox
from tests.lowering.building import BF16, F32, F64, I0, I1, I64, LENGTH, R0
from tests.lowering.lowered import same


def values(expr: Expr, axes: dict[sympy.Symbol, int], **buffers: torch.Tensor) -> torch.Tensor:
    """`expr` over whole axes, expanded to all of them."""
    result = evaluate([expr], {axis: range(n) for axis, n in axes.items()}, Scope(buffers, {}, {}))[0]
    return result.expand(list(axes.values()))


# Expressions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", [2 * I0 + 3 * I1, FloorDiv(5 * I0 - I1, 3), Mod(I0 - 4 * I1, 5), I0 * I1 - 2, I0**2 + 1], ids=str
)
def test_index_arithmetic_is_that_of_python(index: sympy.Expr) -> None:
    def python(expr: sympy.Expr, point: dict[sympy.Symbol, int]) -> int:
        args = [python(arg, point) for arg in expr.args]
        if not args:
            return point[expr] if expr.is_Symbol else int(expr)
        if isinstance(expr, (FloorDiv, Mod)):
            return args[0] // args[1] if isinstance(expr, FloorDiv) else args[0] % args[1]
        return sum(args) if expr.is_Add else math.prod(args) if expr.is_Mul else args[0] ** args[1]

    result = values(IndexValue(index), {I0: 7, I1: 4})
    assert result.tolist() == [[python(index, {I0: i, I1: j}) for j in range(4)] for i in range(7)]


def test_only_the_sum_of_an_index_must_be_an_integer() -> None:
    scope = Scope({}, {LENGTH: 6}, {})
    result = evaluate([IndexValue(LENGTH / 2 * I0 + LENGTH / 3)], {I0: range(3)}, scope)[0]
    assert result.tolist() == [2, 5, 8]
    with pytest.raises(VerifyError, match="no value"):
        evaluate([IndexValue(LENGTH * I0)], {I0: range(3)}, Scope({}, {}, {}))


def test_values_are_computed_only_over_the_axes_they_vary_with() -> None:
    row = Load("x", (I1,), F32)
    assert [
        tuple(v.shape)
        for v in evaluate(
            [row, Const(1.0, F32), op("mul", row, Cast(IndexValue(I0), F32))],
            {I0: range(3), I1: range(5)},
            Scope({"x": torch.arange(5.0)}, {}, {}),
        )
    ] == [(1, 5), (1, 1), (3, 5)]


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).T,
        torch.randn(3, 1).expand(3, 4),
        torch.randn(20)[5:17].view(3, 4),
        torch.randn(9, 8)[::3, ::2],
        torch.randn(12).as_strided((3, 4), (2, 1)),
    ],
    ids=["contiguous", "transposed", "expanded", "offset", "strided", "overlapping"],
)
def test_loads_read_any_layout(x: torch.Tensor) -> None:
    same(values(Load("x", (I0, I1), F32), {I0: 3, I1: 4}, x=x), x.contiguous())
    same(values(Load("x", (2 - I0, FloorDiv(I1, 2)), F32), {I0: 3, I1: 4}, x=x), x.flip(0)[:, [0, 0, 1, 1]])


@pytest.mark.parametrize("index", [(I0, I1), (2 - I0, I1), (I1, 2 * I0 + 1), (1, I1), (I0, LENGTH / 2 * I1)], ids=str)
def test_loads_along_views_are_those_by_positions(
    index: tuple[sympy.Expr, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, box, sizes = torch.randn(7, 9)[::2], {I0: range(1, 3), I1: range(4)}, {LENGTH: 4}
    load = Load("x", tuple(map(sympy.sympify, index)), F32)
    (viewed,) = evaluate([load], box, Scope({"x": x}, sizes, {}))
    monkeypatch.setattr("fusion.lowering.interpret.evaluate.strided_view", lambda *_: None)
    same(viewed, evaluate([load], box, Scope({"x": x}, sizes, {}))[0])


def test_results_share_no_memory_with_buffers_unless_they_may() -> None:
    x, load, box = torch.arange(6.0), Load("x", (I0 + 1,), F32), {I0: range(5)}
    (kept,), (shared,) = (evaluate([load], box, Scope({"x": x}, {}, {}), fresh=fresh) for fresh in (True, False))
    x.zero_()
    assert kept.tolist() == [1, 2, 3, 4, 5] and shared.tolist() == [0] * 5


@pytest.mark.parametrize(
    "dtype",
    [
        F64,
        torch.float16,
        BF16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.uint16,
        torch.uint64,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_loads_read_any_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(6).to(dtype)
    masked = Load("x", (I0 - 1,), dtype, op("gt", IndexValue(I0), const(0, I64)))
    same(values(Load("x", (5 - I0,), dtype), {I0: 6}, x=x), torch.arange(5, -1, -1).to(dtype))
    assert values(masked, {I0: 7}, x=x).to(torch.complex64).tolist() == [0, *x.to(torch.complex64).tolist()]


def test_gathers_read_at_a_loaded_index() -> None:
    table, where = torch.randn(10, 4), torch.randint(0, 10, (5,))
    same(values(Load("t", (Load("w", (I0,), I64), I1), F32), {I0: 5, I1: 4}, t=table, w=where), table[where])


def test_masked_loads_read_nothing_and_give_zero() -> None:
    x = torch.full((4,), float("nan"))
    inside = op("lt", IndexValue(I0), const(4, I64))
    same(values(Load("x", (I0 + 1000,), F32, op("not", inside)), {I0: 4}, x=x), torch.zeros(4))
    result = values(Load("x", (I0,), F32, inside), {I0: 6}, x=x)
    assert result.isnan().tolist() == [True] * 4 + [False] * 2
    same(values(Load("x", (I0,), F32, Const(False, torch.bool)), {I0: 3}, x=torch.empty(0)), torch.zeros(3))


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ((I0 + 1, I1), r"x\[i0 \+ 1, i1\] reaches 3, outside \[0, 3\)"),
        ((I0, I1 - 1), r"reaches -1"),
        ((I0, I1 + I0), "reaches"),
        ((I1, I0), "reaches 3"),
    ],
)
def test_unmasked_loads_outside_are_refused(index: tuple[sympy.Expr, ...], text: str) -> None:
    with pytest.raises(VerifyError, match=text):
        values(Load("x", index, F32), {I0: 3, I1: 4}, x=torch.randn(3, 4))


def test_gathers_outside_are_refused() -> None:
    load = Load("t", (Load("w", (I0,), I64),), F32)
    for bad in (-1, 10):
        with pytest.raises(VerifyError, match=f"reaches {bad}"):
            values(load, {I0: 2}, t=torch.randn(10), w=torch.tensor([3, bad]))


def test_names_ranks_and_dtypes_must_be_as_stated() -> None:
    with pytest.raises(VerifyError, match="read before it is written"):
        values(Load("x", (I0,), F32), {I0: 2})
    with pytest.raises(VerifyError, match="has 2 dimensions"):
        values(Load("x", (I0,), F32), {I0: 2}, x=torch.randn(2, 2))
    with pytest.raises(VerifyError, match=r"holds torch\.float64"):
        values(Load("x", (I0,), F32), {I0: 2}, x=torch.randn(2, dtype=F64))
    with pytest.raises(VerifyError, match=r"gives torch\.float32, not torch\.int64"):
        values(Op("exp", (IndexValue(I0),), I64), {I0: 2})


@pytest.mark.parametrize(
    "dtype", [F32, F64, BF16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str
)
@pytest.mark.parametrize("name", sorted(SCALAR_OPS))
def test_operations_keep_the_dtype_they_state(name: str, dtype: torch.dtype) -> None:
    """Every operation, on every dtype, results in the dtype of its row in the table."""
    args = [torch.tensor([2, 3]).to(dtype)] * SCALAR_OPS[name].arity
    if name == "where":
        args[0] = torch.tensor([True, False])
    try:
        expected = SCALAR_OPS[name].meaning(*args)
    except (RuntimeError, NotImplementedError):
        return
    loaded = [Load(f"a{k}", (I0,), arg.dtype) for k, arg in enumerate(args)]
    node = Op(name, tuple(loaded), result_dtype(name, dtype))
    buffers = {f"a{k}": arg for k, arg in enumerate(args)}
    if expected.dtype is node.dtype:
        same(values(node, {I0: 2}, **buffers), expected)
    else:
        with pytest.raises(VerifyError):
            values(node, {I0: 2}, **buffers)


def test_casts_agree_with_torch() -> None:
    x = torch.tensor([-1.7, 0.0, -0.0, 0.3, 255.9, float("nan"), float("inf")])
    for dtype in (torch.bool, BF16, torch.float16, F64):
        same(values(Cast(Load("x", (I0,), F32), dtype), {I0: 7}, x=x), x.to(dtype))
    same(values(Cast(Load("x", (I0,), F32), torch.int32), {I0: 5}, x=x), x[:5].to(torch.int32))
    same(values(IndexValue(I0, torch.int32), {I0: 3}), torch.arange(3, dtype=torch.int32))


def test_ten_thousand_operations_deep() -> None:
    root: Expr = Load("x", (I0,), F64)
    for _ in range(10_000):
        root = op("add", root, Const(1.0, F64))
    same(values(root, {I0: 2}, x=torch.zeros(2, dtype=F64)), torch.full((2,), 1e4, dtype=F64))


# Random numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that Random123, the authors' library, is tested with
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    c0, c1, c2, c3 = map(torch.tensor, counter)
    k0, k1 = map(torch.tensor, key)
    assert [int(word) for word in philox.philox((c0, c1, c2, c3), (k0, k1))] == expected


def test_seed_and_offset_use_all_their_64_bits() -> None:
    offsets = torch.tensor([0, 1, 1 << 32, (1 << 32) + 1, -1])
    seeds = torch.tensor([[7], [7 + (1 << 32)], [-7]])
    assert len(set(philox.words(seeds, offsets)[0].flatten().tolist())) == 15


def test_random_numbers_have_their_distributions() -> None:
    n = 1 << 16
    draw = {
        kind: values(Random(kind, Load("seed", (), I64), I0), {I0: n}, seed=torch.tensor(3))
        for kind in ("uniform", "normal")
    }
    assert all(v.dtype is F32 for v in draw.values())
    uniform, normal = draw["uniform"].double(), draw["normal"].double()
    assert 0 <= uniform.min() < 1e-3 < 1 - 1e-3 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5e-3
    assert abs(uniform.var() - 1 / 12) < 2e-3
    assert abs(normal.mean()) < 2e-2
    assert abs(normal.var() - 1) < 2e-2
    assert torch.equal(draw["uniform"], philox.uniform(torch.tensor(3), torch.arange(n)))
    assert philox._unit(torch.tensor([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])).lt(1).all()


# Folds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [[0], [1], [0, 2], [0, 1, 2], []], ids=str)
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "any", "all"])
def test_folds_agree_with_torch(name: str, dims: list[int]) -> None:
    x = torch.randn(2, 3, 4, dtype=F64)
    x = x > 0.3 if name in ("any", "all") else x
    expected = x
    torch_fold = {"max": torch.amax, "min": torch.amin}.get(name) or getattr(torch, name)
    for dim in dims:
        expected = torch_fold(expected, dim, keepdim=True)
    torch.testing.assert_close(fold(name, [x], dims), [expected])


def test_16_bit_floats_and_small_integers_are_summed_wide() -> None:
    x = torch.full((4096,), 1.0, dtype=BF16)
    assert fold("sum", [x], [0])[0].item() == 4096  # a bfloat16 sum stops at 256
    assert fold("sum", [x], [0])[0].dtype is F32
    assert fold("sum", [torch.full((4,), 100, dtype=torch.int8)], [0])[0].item() == 400
    assert fold("prod", [torch.full((9,), 2.0, dtype=torch.float16)], [0])[0].item() == 512


def test_extremes_give_nan_if_there_is_one() -> None:
    x = torch.tensor([[1.0, float("nan"), 3.0], [1.0, 2.0, 0.0]])
    same(fold("max", [x], [1])[0], torch.tensor([[float("nan")], [2.0]]))
    same(fold("min", [x], [1])[0], torch.tensor([[float("nan")], [0.0]]))


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("kind", ["ties", "nan", "infinite", "integers", "bools"])
def test_positions_of_extremes_agree_with_eager(name: str, kind: str) -> None:
    x = torch.randint(0, 3, (50, 9)).float()
    if kind == "nan":
        x[torch.rand(50, 9) < 0.2] = float("nan")
    if kind == "infinite":
        x = torch.full((50, 9), float("-inf" if name == "argmax" else "inf"))
    x = x.to({"integers": torch.int32, "bools": torch.bool}.get(kind, F32))
    index = torch.arange(9).expand(50, 9)
    assert torch.equal(
        fold(name, [x, index], [1])[-1][:, 0], getattr(torch, name)(x.to(torch.uint8) if kind == "bools" else x, 1)
    )
    assert fold(name, [x[:1], index[:1]], [0, 1])[-1].item() == getattr(torch, name)(x[0].to(F32)).item()


@pytest.mark.parametrize("dtype", [F32, F64, BF16, torch.int8], ids=str)
def test_dot_is_a_product_of_matrices(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-128, 128, s).to(dtype) for s in ((3, 5, 700), (3, 700, 4)))
    result = fold("dot", [a[:, :, None, :], b.transpose(1, 2)[:, None, :, :]], [3])[0]
    assert result.dtype is {F64: F64, torch.int8: torch.int32}.get(dtype, F32)
    torch.testing.assert_close(result[..., 0].to(F64), a.to(F64) @ b.to(F64), rtol=1e-5, atol=1)


def test_products_of_integers_are_summed_exactly() -> None:
    a, b = torch.randint(100, 128, (2, 20_000), dtype=torch.int8)
    result = fold("dot", [a, b], [0])[0].item()
    assert result == (a.long() * b.long()).sum().item() > 1 << 27  # where float32 has no odd numbers


def test_boxes_cover_a_space_once() -> None:
    axes = {I0: range(5), I1: range(2, 9), R0: range(3)}
    for count in (1, 2, 5, 9, 100, 1000):
        points = [(i, j, r) for box in boxes(axes, count) for i in box[I0] for j in box[I1] for r in box[R0]]
        assert sorted(points) == sorted({(i, j, r) for i in range(5) for j in range(2, 9) for r in range(3)})
