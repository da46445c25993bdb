"""Facts about calls, compared with numbers: a fact is derived from a call exactly where its lowered form shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.joint.facts import (
    averaged,
    axis_order,
    compared,
    constant_of,
    fold_of,
    folds,
    is_rearranged,
    keeps_elements,
    matrices,
    memories,
)
from fusion.joint.linearity import is_gradient, is_linear
from fusion.joint.special_numbers import is_zero_of_zero, spreading

aten = torch.ops.aten
Call = tuple[Callable[..., torch.Tensor], tuple[object, ...]]

ROWS, COLUMNS = 4, 6


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y, ROW, POSITIVE = numbers(ROWS, COLUMNS), numbers(ROWS, COLUMNS, seed=1), numbers(COLUMNS), numbers(ROWS, 1).exp()
MASK, PLACES = X > 0, torch.arange(ROWS).view(ROWS, 1)

VIEWS: dict[str, Call] = {
    "view": (aten.view.default, (X, [COLUMNS, ROWS])),
    "reshape": (aten.reshape.default, (X, [ROWS * COLUMNS])),
    "_unsafe_view": (aten._unsafe_view.default, (X, [2, 12])),
    "unsqueeze": (aten.unsqueeze.default, (X, 1)),
    "squeeze": (aten.squeeze.default, (POSITIVE,)),
    "squeeze dim": (aten.squeeze.dim, (POSITIVE, 1)),
    "squeeze dims": (aten.squeeze.dims, (POSITIVE, [1])),
    "expand": (aten.expand.default, (POSITIVE, [ROWS, COLUMNS])),
    "expand to itself": (aten.expand.default, (X, [1, ROWS, COLUMNS])),
    "detach": (aten.detach.default, (X,)),
    "alias": (aten.alias.default, (X,)),
    "clone": (aten.clone.default, (X,)),
    "t": (aten.t.default, (X,)),
    "transpose": (aten.transpose.int, (X, 0, 1)),
    "transpose of a column": (aten.transpose.int, (POSITIVE, 0, 1)),
    "permute": (aten.permute.default, (numbers(2, 3, 4), [2, 0, 1])),
    "permute of 1": (aten.permute.default, (numbers(2, 1, 4), [1, 0, 2])),
    "slice": (aten.slice.Tensor, (X, 1, 1, 4)),
    "select": (aten.select.int, (X, 0, 1)),
    "flip": (aten.flip.default, (X, [1])),
}
ELEMENTWISE: dict[str, Call] = {
    "to float32": (lambda x: aten._to_copy.default(x, dtype=torch.float32), (X,)),
    "to float64": (lambda x: aten._to_copy.default(x, dtype=torch.float64), (X.float(),)),
    "neg": (aten.neg.default, (X,)),
    "add": (aten.add.Tensor, (X, Y)),
    "add to a row": (aten.add.Tensor, (X, ROW)),
    "add a number": (aten.add.Tensor, (X, 2.0)),
    "sub": (aten.sub.Tensor, (X, Y)),
    "mul": (aten.mul.Tensor, (X, Y)),
    "mul a number": (aten.mul.Tensor, (X, 2.0)),
    "mul an infinity": (aten.mul.Scalar, (X, float("inf"))),
    "div": (aten.div.Tensor, (X, POSITIVE)),
    "div by a number": (aten.div.Tensor, (X, 3.0)),
    "div by 0": (aten.div.Scalar, (X, 0.0)),
    "exp": (aten.exp.default, (X,)),
    "log": (aten.log.default, (POSITIVE,)),
    "abs": (aten.abs.default, (X,)),
    "relu": (aten.relu.default, (X,)),
    "sigmoid": (aten.sigmoid.default, (X,)),
    "tanh": (aten.tanh.default, (X,)),
    "reciprocal": (aten.reciprocal.default, (POSITIVE,)),
    "maximum": (aten.maximum.default, (X, Y)),
    "clamp": (aten.clamp.default, (X, -1.0, 1.0)),
    "clamp_min": (aten.clamp_min.default, (X, 0.0)),
    "where": (aten.where.self, (MASK, X, Y)),
    "masked with 0": (aten.masked_fill.Scalar, (X, MASK, 0.0)),
    "masked with 1": (aten.masked_fill.Scalar, (X, MASK, 1.0)),
    "eq": (aten.eq.Tensor, (X, X.relu())),
    "ne of another float": (aten.ne.Tensor, (X, ROW.float())),
    "eq to a number": (aten.eq.Scalar, (X.round(), 1.0)),
    "lt": (aten.lt.Tensor, (X, Y)),
    "sign": (aten.sign.default, (X,)),
    "square": (aten.pow.Tensor_Scalar, (X, 2)),
    "tanh_backward": (aten.tanh_backward.default, (X, Y)),
    "native_dropout_backward": (aten.native_dropout_backward.default, (X, MASK, 1.25)),
}
OTHERS: dict[str, Call] = {
    "sum": (aten.sum.default, (X,)),
    "sum of rows": (aten.sum.dim_IntList, (X, [1])),
    "mean": (aten.mean.default, (X,)),
    "mean of rows": (aten.mean.dim, (X, [1])),
    "mean of columns": (aten.mean.dim, (X, [0])),
    "mean of two dimensions": (aten.mean.dim, (numbers(2, 3, 4), [-1, 1], True)),
    "amax": (aten.amax.default, (X, [1])),
    "cumsum": (aten.cumsum.default, (X, 1)),
    "softmax": (aten._softmax.default, (X, 1, False)),
    "var": (aten.var.correction, (X, [1])),
    "mm": (aten.mm.default, (X, Y.t().contiguous())),
    "mm of itself": (lambda x: aten.mm.default(x, x), (numbers(3, 3),)),
    "mm of integers": (aten.mm.default, (X.to(torch.int32), Y.t().to(torch.int32).contiguous())),
    "mv": (aten.mv.default, (X, ROW)),
    "addmm": (aten.addmm.default, (POSITIVE, X, Y.t().contiguous())),
    "bmm": (aten.bmm.default, (numbers(2, 3, 4), numbers(2, 4, 5))),
    "cat": (lambda x, y: aten.cat.default([x, y], 1), (X, Y)),
    "scatter": (aten.scatter.src, (X, 1, PLACES, POSITIVE)),
    "scatter_add": (aten.scatter_add.default, (X, 1, PLACES, POSITIVE)),
    "slice_scatter": (aten.slice_scatter.default, (X, numbers(2, COLUMNS), 0, 1, 3)),
    "select_scatter": (aten.select_scatter.default, (X, ROW, 0, 1)),
    "gather": (aten.gather.default, (X, 1, PLACES)),
    "new_zeros": (aten.new_zeros.default, (X, [2])),
    "zeros_like": (aten.zeros_like.default, (X,)),
    "softmax_backward": (aten._softmax_backward_data.default, (X, Y, 1, torch.float64)),
}
CALLS = {**VIEWS, **ELEMENTWISE, **OTHERS}


def traced(name: str) -> tuple[fx.GraphModule, fx.Node]:
    """The graph of a call, and its node."""
    function, args = CALLS[name]
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    module = make_fx(lambda *given: function(*with_tensors(args, given)), tracing_mode="fake")(*tensors)
    (node,) = (node for node in module.graph.nodes if node.op == "call_function")
    return module, node


def with_tensors(args: tuple[object, ...], tensors: tuple[torch.Tensor, ...]) -> Iterator[object]:
    rest = iter(tensors)
    return (next(rest) if isinstance(arg, torch.Tensor) else arg for arg in args)


def called(name: str, *tensors: torch.Tensor) -> torch.Tensor:
    function, args = CALLS[name]
    return function(*with_tensors(args, tensors))


def operands(name: str) -> list[torch.Tensor]:
    return [arg for arg in CALLS[name][1] if isinstance(arg, torch.Tensor)]


def is_linear_by_numbers(name: str, inside: tuple[int, ...]) -> bool:
    """Is f(s·x + y) = s·f(x) + f(y), where the operands that are not inside are the same in all three?"""
    first = operands(name)
    second = [numbers(*x.shape, seed=9 + k).to(x.dtype) if k in inside else x for k, x in enumerate(first)]
    both = [3 * x + y if k in inside else x for k, (x, y) in enumerate(zip(first, second, strict=True))]
    expected = 3 * called(name, *first) + called(name, *second)
    return torch.allclose(called(name, *both).double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_linear_operands_are_exactly_those_shown_by_numbers(name: str) -> None:
    module, node = traced(name)
    holders = module.graph.find_nodes(op="placeholder")
    floats = [k for k, operand in enumerate(operands(name)) if operand.is_floating_point()]
    for count in range(1, len(floats) + 1):
        for inside in combinations(floats, count):
            seen = is_linear_by_numbers(name, inside) and name != "mul an infinity"
            claimed = is_linear(node, [holders[k] for k in inside])
            assert claimed == seen or name in ("mul an infinity", "div by 0"), inside


@pytest.mark.parametrize("name", {**VIEWS, **ELEMENTWISE})
def test_calls_that_keep_zeros_are_exactly_those_shown_by_numbers(name: str) -> None:
    _, node = traced(name)
    given = operands(name)
    whole = name not in ("slice", "select", "t", "transpose", "permute", "flip")  # of other elements than their own
    seen = len(given) == 1 and whole and bool((called(name, torch.zeros_like(given[0])) == 0).all())
    assert is_zero_of_zero(node, node.all_input_nodes[0]) == seen


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operands_that_propagate_nan_are_exactly_those_shown_by_numbers(name: str) -> None:
    module, node = traced(name)
    given, holders = operands(name), module.graph.find_nodes(op="placeholder")
    seen = []
    for k, operand in enumerate(given):
        if operand.is_floating_point():
            wrong = [torch.full_like(operand, float("nan")) if k == j else each for j, each in enumerate(given)]
            if called(name, *wrong).isnan().all():
                seen.append(holders[k])
    assert spreading(node) == seen


def test_a_nan_goes_through_a_choice_whose_condition_is_false_of_it() -> None:
    def choose(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        infinite = x.abs() == float("inf")
        return (
            *(torch.where(infinite, 0.0, x), torch.where(x == -1.0, 1.0, x), torch.where(x > y, y, x)),
            *(torch.where(x != 0.0, 1.0, x), torch.where(infinite, 0.0, y), torch.where(~infinite, 1.0, x)),
        )

    module = make_fx(choose, tracing_mode="fake")(X, Y)
    x, y = module.graph.find_nodes(op="placeholder")
    chosen = module.graph.find_nodes(op="call_function", target=aten.where.self)
    assert [spreading(node) for node in chosen] == [[x], [x], [x], [], [], []]
    assert y not in spreading(chosen[2]), "where y alone is NaN, x > y is false and x is taken"


@pytest.mark.parametrize("name", {**VIEWS, **ELEMENTWISE})
def test_calls_that_keep_the_order_are_exactly_those_shown_by_numbers(name: str) -> None:
    _, node = traced(name)
    operand = operands(name)[0]
    result = called(name, *operands(name))
    seen = result.numel() == operand.numel() and torch.allclose(result.flatten().double(), operand.flatten().double())
    assert keeps_elements(node, node.all_input_nodes[0]) == seen


@pytest.mark.parametrize(
    ("name", "order"),
    [("t", [1, 0]), ("transpose", [1, 0]), ("permute", [2, 0, 1]), ("permute of 1", [0, 2]), ("unsqueeze", [0, 1])],
)
def test_a_permutation_has_an_order(name: str, order: list[int]) -> None:
    _, node = traced(name)
    assert axis_order(node) == order


@pytest.mark.parametrize("name", ["expand", "slice", "select", "flip", "view", "neg", "add", "sum of rows", "gather"])
def test_other_calls_have_no_order(name: str) -> None:
    _, node = traced(name)
    assert axis_order(node) is None


@pytest.mark.parametrize("name", CALLS)
def test_a_rearrangement_has_exactly_the_elements_of_its_operand(name: str) -> None:
    _, node = traced(name)
    first = operands(name)[0]
    seen = len(operands(name)) == 1 and set(called(name, first).flatten().tolist()) == set(first.flatten().tolist())
    assert is_rearranged(node) == (seen and name in VIEWS)


@pytest.mark.parametrize("name", ["view", "_unsafe_view", "t", "slice", "clone", "neg", "sum"])
def test_views_share_memory(name: str) -> None:
    _, node = traced(name)
    assert memories(node).isdisjoint(memories(node.all_input_nodes[0])) == (name in ("clone", "neg", "sum"))


def test_constants_are_known() -> None:
    def constants(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            *(aten.zeros.default([2]), aten.zeros_like.default(x), aten.new_zeros.default(x, [3])),
            *(aten.full.default([2], 2.5), aten.scalar_tensor.default(7.0), aten.ones_like.default(x)),
            *(aten.full.default([2], 0.5).view(2, 1), x * 0, x.sum(), x),
        )

    module = make_fx(constants, tracing_mode="fake")(X)
    results = module.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    assert list(map(constant_of, results)) == [0, 0, 0, 2.5, 7, 1, None, None, None, None]


def test_folds_are_recognised_by_their_results() -> None:
    def reduced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = x.max(1)
        return x.amax(1, keepdim=True), values, places, x.half().amin(1), x.abs().exp(), x.softmax(1)

    module = make_fx(reduced, tracing_mode="fake")(X)
    results = module.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    taken = [fold_of(node) for node in results if isinstance(node, fx.Node)]
    assert [None if fold is None else fold.op for fold in taken] == ["max", "max", "argmax", "min", None, None]
    assert isinstance(results[-1], fx.Node)
    assert [fold.op for fold in folds(results[-1])] == ["max", "sum"]


MEANS = {"mean": {0: 2}, "mean of rows": {0: 1}, "mean of two dimensions": {0: 2}, "var": {0: 1}}
"""Calls that compute means → the operands that they read by rows, with the dimensions of a row."""

NORMS: dict[str, tuple[Call, dict[int, int]]] = {
    "layer_norm": ((aten.native_layer_norm.default, (X, [COLUMNS], ROW, None, 1e-5)), {0: 1}),
    "layer_norm of matrices": ((aten.native_layer_norm.default, (numbers(2, 3, 4), [3, 4], None, None, 1e-5)), {0: 2}),
    "layer_norm_backward": (
        (
            aten.native_layer_norm_backward.default,
            (X, Y, [COLUMNS], POSITIVE, POSITIVE, ROW, None, [True, True, False]),
        ),
        {0: 1, 1: 1, 4: 1},
    ),
    "var_mean": ((aten.var_mean.correction, (X, [1])), {0: 1}),
}
"""Calls with several results → the operands that they read by rows; the weight is one row, also for a gradient."""


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_averaged_by_means_alone(name: str) -> None:
    module, node = traced(name)
    holders = module.graph.find_nodes(op="placeholder")
    assert dict(averaged(node)) == {holders[k]: rows for k, rows in MEANS.get(name, {}).items()}


@pytest.mark.parametrize("name", NORMS)
def test_rows_are_averaged_by_norms(name: str) -> None:
    (function, args), expected = NORMS[name]
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    module = make_fx(lambda *given: function(*with_tensors(args, given)), tracing_mode="fake")(*tensors)
    holders = module.graph.find_nodes(op="placeholder")
    calls = module.graph.find_nodes(op="call_function", target=function)
    assert [dict(averaged(node)) for node in calls] == [{holders[k]: rows for k, rows in expected.items()}]


@pytest.mark.parametrize("name", CALLS)
def test_tensors_are_compared_by_equalities_alone(name: str) -> None:
    _, node = traced(name)
    assert compared(node) == (node.all_input_nodes if name in ("eq", "ne of another float") else [])


@pytest.mark.parametrize("name", CALLS)
def test_matrices_are_the_operands_of_a_product_and_of_nothing_else(name: str) -> None:
    _, node = traced(name)
    pair = matrices(node)
    assert (pair is not None) == (name in ("mm", "mm of itself", "bmm"))
    if pair is not None:
        given = dict(zip(node.graph.find_nodes(op="placeholder"), operands(name), strict=True))
        assert torch.equal(called(name, *operands(name)), given[pair[0]] @ given[pair[1]])


def test_derivatives_are_recognised_by_their_schema() -> None:
    gradients = {name for name in CALLS if is_gradient(traced(name)[1])}
    assert gradients == {"tanh_backward", "native_dropout_backward", "softmax_backward"}
