"""Products, sums, sums of rows and broadcasts of calls are derived from their lowered forms, and hold for numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.joint.factors import Factor, Part, added, multiplied
from fusion.joint.facts import broadcast_of, row_sum

aten = torch.ops.aten
Function = Callable[[torch.Tensor, torch.Tensor], object]

ROWS, COLUMNS = 4, 6
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, COLUMNS, generator=GENERATOR, dtype=torch.float64)
OTHERS = {
    "matrix": torch.randn(ROWS, COLUMNS, generator=GENERATOR, dtype=torch.float64),
    "row": torch.randn(COLUMNS, generator=GENERATOR, dtype=torch.float64),
    "column": torch.randn(ROWS, 1, generator=GENERATOR, dtype=torch.float64),
    "mask": torch.rand(ROWS, COLUMNS, generator=GENERATOR) > 0.5,
    "integers": torch.arange(COLUMNS),
    "zero": torch.zeros((), dtype=torch.float64),
}


def call(function: Function, other: str) -> tuple[fx.GraphModule, fx.Node]:
    """The graph of a function of `X` and another tensor, and its last call."""
    module = make_fx(function, tracing_mode="fake")(X, OTHERS[other])
    return module, [node for node in module.graph.nodes if node.op == "call_function"][-1]


def numbers(module: fx.GraphModule, other: str) -> dict[fx.Node, torch.Tensor]:
    """The numbers of every node."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.run(X, OTHERS[other])
    return {node: value for node, value in interpreter.env.items() if isinstance(value, torch.Tensor)}


def number(part: Part, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor | float:
    if isinstance(part, Factor):
        return (~values[part.root] if part.inverted else values[part.root]).double()
    return values[part].double() if isinstance(part, fx.Node) else part


PRODUCTS: dict[str, tuple[Function, str, int]] = {
    "mul": (lambda x, y: x * y, "matrix", 2),
    "mul with a row": (lambda x, y: x * y, "row", 2),
    "mul with a number": (lambda x, y: x * 0.1, "row", 2),
    "mul with a mask": (lambda x, y: x * y, "mask", 2),
    "mul with integers": (lambda x, y: x * y, "integers", 2),
    "div": (lambda x, y: x / y, "column", 2),
    "neg": (lambda x, y: -x, "row", 2),
    "reciprocal": (lambda x, y: y.reciprocal(), "row", 2),
    "square": (lambda x, y: x**2, "row", 2),
    "cube": (lambda x, y: x**3, "row", 3),
    "inverse square": (lambda x, y: y**-2, "row", 3),
    "masked": (lambda x, y: torch.where(y, x, 0.0), "mask", 2),
    "masked, inverted": (lambda x, y: torch.where(y, 0.0, x), "mask", 2),
    "masked with a tensor": (lambda x, y: torch.where(x > 0, x, y), "zero", 0),
    "masked_fill": (lambda x, y: x.masked_fill(y, 0), "mask", 2),
    "dropout, backward": (lambda x, y: aten.native_dropout_backward(x, y, 1.25), "mask", 3),
    "add": (lambda x, y: x + y, "matrix", 0),
    "div by 0": (lambda x, y: x / 0, "row", 0),
    "div, rounded": (lambda x, y: torch.div(x, y, rounding_mode="floor"), "column", 0),
    "addcmul": (lambda x, y: aten.addcmul(x, x, y), "row", 0),
    "relu": (lambda x, y: x.relu(), "row", 0),
    "sigmoid": (lambda x, y: x.sigmoid(), "row", 0),
    "fourth power": (lambda x, y: x**4, "row", 0),
    "filled with 1": (lambda x, y: x.masked_fill(y, 1), "mask", 0),
    "mul of integers": (lambda x, y: y * y, "integers", 0),
    "quantised": (lambda x, y: (x * y).to(torch.float8_e4m3fn), "row", 0),
    "transpose": (lambda x, y: x.t(), "row", 0),
    "tril": (lambda x, y: x.tril(), "row", 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_factors_of_a_call_multiply_to_its_result(name: str) -> None:
    function, other, count = PRODUCTS[name]
    module, node = call(function, other)
    parts = multiplied(node)
    assert len(parts) == count
    values = numbers(module, other)
    result = torch.ones((), dtype=torch.float64)
    for part, divides in parts:
        result = result / number(part, values) if divides else result * number(part, values)
    if parts:
        torch.testing.assert_close(result.expand(values[node].shape), values[node])


def test_a_dropout_is_a_product_with_its_own_mask() -> None:
    def drop(x: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
        return list(aten.native_dropout(x, 0.2, True))

    module, _ = call(drop, "row")
    dropped, mask = (node for node in module.graph.nodes if node.name.startswith("getitem"))
    (x, *_) = module.graph.find_nodes(op="placeholder")
    assert multiplied(dropped) == [(x, False), (mask, False), (1.25, False)]
    assert multiplied(mask) == []


SUMS: dict[str, tuple[Function, str, list[float]]] = {
    "add": (lambda x, y: x + y, "row", [1, 1]),
    "add with alpha": (lambda x, y: torch.add(x, y, alpha=0.1), "row", [1, 0.1]),
    "add a number": (lambda x, y: x + 3, "row", [1, 1]),
    "sub": (lambda x, y: x - y, "integers", [1, -1]),
    "sub with alpha": (lambda x, y: torch.sub(x, y, alpha=3), "matrix", [1, -3]),
    "subtracted from a number": (lambda x, y: 2 - x, "row", [1, -1]),
    "addcmul": (lambda x, y: aten.addcmul(x, x, y), "row", []),
    "mul": (lambda x, y: x * y, "row", []),
    "add of integers": (lambda x, y: y + y, "integers", []),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_terms_of_a_call_add_to_its_result(name: str) -> None:
    function, other, coefficients = SUMS[name]
    module, node = call(function, other)
    terms = added(node)
    assert [scale for _, scale in terms] == coefficients
    values = numbers(module, other)
    if terms:
        torch.testing.assert_close(sum(scale * number(part, values) for part, scale in terms), values[node])


ROW_SUMS: dict[str, tuple[Function, int | None]] = {
    "sum": (lambda x, y: x.sum(-1), 1),
    "sum, kept": (lambda x, y: x.sum(1, keepdim=True), 1),
    "sum of all": (lambda x, y: y.sum(), 1),
    "mean": (lambda x, y: x.mean(-1, keepdim=True), COLUMNS),
    "sum of 16-bit floats": (lambda x, y: aten.sum.dim_IntList(x.half(), [-1]), 1),
    "sum of columns": (lambda x, y: x[:, :ROWS].sum(0), None),
    "sum of two axes": (lambda x, y: x.sum([0, 1]), None),
    "sum of one element": (lambda x, y: x[:, :1].sum(-1), None),
    "sum of bools": (lambda x, y: (x > 0).sum(-1), None),
    "maximum": (lambda x, y: x.amax(-1), None),
    "norm": (lambda x, y: aten.linalg_vector_norm(x, 1, [-1]), None),
    "product": (lambda x, y: x.prod(-1), None),
    "selection": (lambda x, y: x[:, 0], None),
}


@pytest.mark.parametrize("name", ROW_SUMS)
def test_sums_and_means_over_the_last_axis_are_recognised(name: str) -> None:
    function, divisor = ROW_SUMS[name]
    _, node = call(function, "row")
    assert row_sum(node) == (None if divisor is None else (node.all_input_nodes[0], divisor))


def test_a_mean_over_a_symbolic_axis_divides_by_its_length() -> None:
    module = make_fx(lambda x: x.mean(-1), tracing_mode="symbolic")(X)
    (mean,) = module.graph.find_nodes(op="call_function", target=aten.mean.dim)
    rows = row_sum(mean)
    assert rows is not None and rows[1].is_Symbol


BROADCASTS: dict[str, tuple[Function, str, bool]] = {
    "expand": (lambda x, y: y.expand(ROWS, COLUMNS), "column", True),
    "expand of a row": (lambda x, y: y.expand(ROWS, COLUMNS), "row", True),
    "repeat of a column": (lambda x, y: y.repeat(1, COLUMNS), "column", True),
    "repeat of rows": (lambda x, y: x.repeat(2, 1), "row", False),
    "transpose": (lambda x, y: x[:, :ROWS].t(), "row", False),
    "flip": (lambda x, y: y.flip(0), "row", False),
    "neg": (lambda x, y: -x, "row", False),
    "product": (lambda x, y: x * y, "row", False),
}


@pytest.mark.parametrize("name", BROADCASTS)
def test_only_broadcasts_have_a_source(name: str) -> None:
    function, other, is_broadcast = BROADCASTS[name]
    _, node = call(function, other)
    assert broadcast_of(node) is (node.all_input_nodes[0] if is_broadcast else None)


def test_factors_of_16_bit_floats_are_those_before_they_are_widened() -> None:
    def halves(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y = x.half(), y.half()
        return aten.mul(x, y), aten.add(x, y)

    module, _ = call(halves, "row")
    product, total = [node for node in module.graph.nodes if node.op == "call_function"][-2:]
    assert [part for part, _ in multiplied(product)] == product.all_input_nodes
    assert [part for part, _ in added(total)] == product.all_input_nodes
