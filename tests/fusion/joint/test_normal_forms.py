"""Normal forms: equal sums of products have the same one, and zero has none."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.joint.normal_forms import Forms
from fusion.lowering.aten.decompositions import decompositions

GENERATOR = torch.Generator().manual_seed(0)
A, B, P, R = (torch.rand(shape, generator=GENERATOR) + 0.5 for shape in ((12, 4), (20, 4), (12, 20), (12, 1)))
Function = Callable[..., torch.Tensor]


def sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1, keepdim=True)


def vanishes(function: Function) -> bool:
    graph = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(A, B, P, R)
    return Forms().vanishes(graph.graph.output_node().args[0])


ZERO: dict[str, Function] = {
    "a difference": lambda a, b, p, r: p - p,
    "spread": lambda a, b, p, r: (p + r) * (p - r) - (p * p - r * r),
    "with fractions": lambda a, b, p, r: p / 8 - p * 0.125,
    "with alpha": lambda a, b, p, r: torch.add(3 * p, p, alpha=-3),
    "a row before its sum": lambda a, b, p, r: sums(p * r) - sums(p) * r,
    "a constant row": lambda a, b, p, r: sums(r.expand(12, 20)) - 20 * r,
    "a mean": lambda a, b, p, r: p.mean(-1, keepdim=True) - sums(p) / 20,
    "a divisor": lambda a, b, p, r: p / r * r - p,
    "a sum that divides": lambda a, b, p, r: (p * r + p) / (r + 1) - p,
    "a power": lambda a, b, p, r: p**3 - p * p * p,
    "a square that divides": lambda a, b, p, r: p / (r * r) - p / r / r,
    "a reciprocal": lambda a, b, p, r: p * r.reciprocal() - p / r,
    "a mask twice": lambda a, b, p, r: (c := p > 1) * (c * p) - c * p,
    "a mask and its inverse": lambda a, b, p, r: torch.where(c := p > 1, torch.where(c, 0.0, p), 0.0),
    "filled": lambda a, b, p, r: p.masked_fill(c := p > 1, 0) - torch.where(c, 0.0, p),
    "converted": lambda a, b, p, r: p.bfloat16().float() * r - (p * r).half().float(),
    "views": lambda a, b, p, r: (p.view(3, 4, 20) * r.view(3, 4, 1)).view(12, 20) - p * r,
    "products in two orders": lambda a, b, p, r: sums((a @ b.t()) * p) - sums(a * (p @ b)),
    "products of rows": lambda a, b, p, r: sums(((a / r) @ b.t()) * p) - sums(a * ((p / r) @ b)),
    "products of sums": lambda a, b, p, r: sums(((a + r) @ b.t()) * p) - sums(a * (p @ b)) - r * sums(p @ b),
}


@pytest.mark.parametrize("name", ZERO)
def test_expressions_that_are_zero_are_recognised(name: str) -> None:
    assert float(ZERO[name](A, B, P, R).abs().max()) < 0.3  # but for rounding, to halves where there are some
    assert vanishes(ZERO[name])


OTHERS: dict[str, Function] = {
    "another coefficient": lambda a, b, p, r: p / 3 - p * 0.3333333333333333,
    "another power": lambda a, b, p, r: p * p - p,
    "another tensor": lambda a, b, p, r: p - p.exp(),
    "a sum of a product": lambda a, b, p, r: sums(p * p) - sums(p) * sums(p),
    "a column": lambda a, b, p, r: p * p[:1] - p * p[:, :1],
    "rows and columns of as many": lambda a, b, p, r: (q := p[:, :12]) * q[0] - q * q[0][:, None],
    "an inverted mask": lambda a, b, p, r: torch.where(c := p > 1, p, 0.0) - torch.where(c, 0.0, p),
    "a mask that divides": lambda a, b, p, r: (c := p > 1) * p / c - p,
    "a quantised": lambda a, b, p, r: p.to(torch.float8_e4m3fn).float() - p,
    "an integer": lambda a, b, p, r: p.int().float() - p,
    "another matrix": lambda a, b, p, r: sums((a @ b.t()) * p) - sums(a * (p @ (b + 1))),
    "a matrix in another order": lambda a, b, p, r: sums((a @ b.view(4, 20)) * p) - sums(a * (p @ b)),
    "over the other axis": lambda a, b, p, r: (q := p[:, :12]).sum(0) - q.sum(1),
    "infinite": lambda a, b, p, r: p * torch.inf - p * torch.inf,
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_is(name: str) -> None:
    assert not vanishes(OTHERS[name])


def test_an_expression_that_is_too_long_is_an_atom() -> None:
    """A product of many sums is not spread without end, and still equal to itself."""

    def product(x: torch.Tensor) -> torch.Tensor:
        for k in range(12):
            x = x * (x + k)
        return x - x.clone()

    graph = make_fx(product, tracing_mode="fake")(torch.ones(3, 5))
    assert Forms().vanishes(graph.graph.output_node().args[0])


def test_long_chains_need_no_deep_stack() -> None:
    links = sys.getrecursionlimit()

    def chain(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(links):
            y = y + x
        return y - (links + 1) * x

    graph = make_fx(chain, tracing_mode="fake")(torch.ones(3, 5))
    assert Forms().vanishes(graph.graph.output_node().args[0])
