"""Gradients of maxima: exactly those that cancel are removed, in form and in numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

import fusion
from fusion.joint.maxima import drop_vanishing_gradients
from tests.fusion.attentions import scores
from tests.fusion.joint.test_joint import check_values, gradients, joint_graph, run

aten = torch.ops.aten
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
Weigh = Callable[[torch.Tensor], torch.Tensor]

SPREAD = (aten.eq.Tensor, aten.scatter.src)


def kept(s: torch.Tensor) -> torch.Tensor:
    """Keys up to the query's own place; the seventh row keeps none."""
    i = torch.arange(s.shape[-2])[:, None]
    return (torch.arange(s.shape[-1])[None, :] <= i) & (i != 6)


def top(s: torch.Tensor) -> torch.Tensor:
    return s.amax(-1, keepdim=True)


def normalised(e: torch.Tensor) -> torch.Tensor:
    return e / e.sum(-1, keepdim=True)


def finite_top(s: torch.Tensor) -> torch.Tensor:
    m = top(s)
    return torch.where(torch.isinf(m), 0.0, m)


def squeezed(s: torch.Tensor) -> torch.Tensor:
    e = torch.exp(s - s.max(-1)[0][..., None])
    return e / e.sum(-1)[..., None]


def with_a_zero_logit(s: torch.Tensor) -> torch.Tensor:
    """A row with one more logit, which is 0."""
    m = top(s).clamp(min=0.0)
    e = torch.exp(s - m)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-m))


def logarithms(s: torch.Tensor) -> torch.Tensor:
    u = s - top(s)
    return u - torch.exp(u).sum(-1, keepdim=True).log()


WEIGHTS: dict[str, Weigh] = {
    "divided": lambda s: normalised(torch.exp(s - top(s))),
    "by index": lambda s: normalised(torch.exp(s - s.max(-1, keepdim=True).values)),
    "squeezed": squeezed,
    "times a reciprocal": lambda s: (e := torch.exp(s - top(s))) * (1 / e.sum(-1, keepdim=True)),
    "by its mean": lambda s: (e := torch.exp(s - top(s))) / e.mean(-1, keepdim=True) / s.shape[-1],
    "to the base of 2": lambda s: normalised(torch.exp2((t := s * 1.4426950408889634) - top(t))),
    "scaled after": lambda s: normalised(torch.exp((s - top(s)) * 0.7)),
    "capped": lambda s: normalised(torch.exp((t := 20 * torch.tanh(s / 20)) - top(t))),
    "filled": lambda s: normalised(torch.exp((t := s.masked_fill(~kept(s), -torch.inf)) - top(t))),
    "chosen": lambda s: normalised(torch.exp((t := torch.where(kept(s), s, -torch.inf)) - top(t))),
    "added": lambda s: normalised(torch.exp((t := s + torch.where(kept(s), 0.0, -1e4).to(s.dtype)) - top(t))),
    "multiplied": lambda s: normalised(torch.exp(s - top(s)) * kept(s)),
    "with a finite maximum": lambda s: normalised(
        torch.exp((t := s.masked_fill(~kept(s), -torch.inf)) - finite_top(t))
    ),
    "from the least": lambda s: normalised(torch.exp(s + (-s).amin(-1, keepdim=True))),
    "in float32": lambda s: normalised(torch.exp((t := s.float()) - top(t))).to(s.dtype),
    "partly in float32": lambda s: (
        (e := torch.exp((s - top(s)).float())).to(s.dtype) / e.sum(-1, keepdim=True).to(s.dtype)
    ),
    "dropped out": lambda s: torch.dropout(normalised(torch.exp(s - top(s))), 0.2, True),
    "from the sum's logarithm": lambda s: torch.exp(s - ((m := top(s)) + torch.exp(s - m).sum(-1, keepdim=True).log())),
    "of logarithms": lambda s: torch.exp(logarithms(s)),
    "logarithms": logarithms,
    "with another logit": with_a_zero_logit,
}


def divided_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = scores(q, k)
    e = torch.exp(s - top(s))
    return (e @ v) / e.sum(-1, keepdim=True)


def and_its_logarithm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = scores(q, k)
    m = top(s)
    e = torch.exp(s - m)
    return normalised(e) @ v, m + e.sum(-1, keepdim=True).log()


def likelihood(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    places = torch.arange(q.shape[-2])[:, None].expand(*q.shape[:-1], 1)
    return -logarithms(scores(q, k)).gather(-1, places).mean() + v.sum()


def attention(weigh: Weigh) -> Attend:
    return lambda q, k, v: weigh(scores(q, k)) @ v


CANCELS: dict[str, Attend] = {
    **{name: attention(weigh) for name, weigh in WEIGHTS.items()},
    "divided last": divided_last,
    "and its logarithm": and_its_logarithm,
    "likelihood": likelihood,
}

STAYS: dict[str, Attend] = {
    "with something added to the sum": attention(lambda s: (e := torch.exp(s - top(s))) / (e.sum(-1, True) + 1e-3)),
    "not divided": attention(lambda s: torch.exp(s - top(s))),
    "half of the maximum": attention(lambda s: torch.exp(s - top(s) / 2) / torch.exp(s).sum(-1, True)),
    "the maximum too": lambda q, k, v: (normalised(torch.exp((s := scores(q, k)) - (m := top(s)))) @ v, m),
    "divided by another sum": attention(lambda s: torch.exp(s - top(s)) / torch.exp(s).sum(-1, True)),
    "another maximum": attention(lambda s: torch.exp(s - top(s)) / torch.exp(s - top(s * s)).sum(-1, True)),
    # it cancels, but a NaN in the row would be lost
    "centred": attention(lambda s: (u := s - top(s)) - u.mean(-1, keepdim=True)),
    "masked after": attention(lambda s: normalised(torch.exp((s - top(s)).masked_fill(~kept(s), -torch.inf)))),
}


def heads(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2, 11, 4), (3, 2, 13, 4), (3, 2, 13, 4))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def joint(attend: Attend, dtype: torch.dtype = torch.float64) -> tuple[fx.GraphModule, list[object]]:
    return joint_graph(attend, [tensor.requires_grad_() for tensor in heads(dtype)])


def spread(graph: fx.GraphModule) -> int:
    return sum(node.target in SPREAD for node in graph.graph.nodes)


@pytest.mark.parametrize("name", CANCELS)
def test_a_gradient_that_cancels_is_taken_out(name: str) -> None:
    graph, given = joint(CANCELS[name])
    assert spread(graph) == 1
    before = run(graph, given)
    drop_vanishing_gradients(graph)
    assert spread(graph) == 0
    check_values(graph, given)
    tolerance = 1e-5 if "float32" in name else 1e-12
    for got, want in zip(run(graph, given), before, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", STAYS)
def test_any_other_gradient_stays(name: str) -> None:
    graph, _ = joint(STAYS[name])
    nodes = [node.name for node in graph.graph.nodes]
    drop_vanishing_gradients(graph)
    assert spread(graph) >= 1
    assert [node.name for node in graph.graph.nodes] == nodes


def test_one_of_two_gradients_may_stay() -> None:
    graph, given = joint(attention(lambda s: normalised(torch.exp(s - top(s))) * top(s)))
    before = run(graph, given)
    (equal,) = (node for node in graph.graph.nodes if node.target is aten.eq.Tensor)
    users = len(equal.users)
    drop_vanishing_gradients(graph)
    assert spread(graph) == 1
    assert 0 < len(equal.users) < users
    for got, want in zip(run(graph, given), before, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["divided", "by index", "filled", "partly in float32", "logarithms"])
def test_conversions_only_round(name: str, dtype: torch.dtype) -> None:
    graph, _ = joint(CANCELS[name], dtype)
    assert spread(graph) == 1
    drop_vanishing_gradients(graph)
    assert spread(graph) == 0


@pytest.mark.parametrize(
    "name", ["divided", "by index", "filled", "with a finite maximum", "divided last", "multiplied"]
)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_as_in_eager(name: str, number: float) -> None:
    """This includes rows of -∞ alone, which "filled" has."""
    attend, inputs = CANCELS[name], heads(torch.float32)
    inputs[0][0, 1, 4, 2] = number  # one query
    inputs[1][2, 0, 5, 1] = number  # one key, which all queries see
    eager = gradients(attend, inputs)
    torch._dynamo.reset()
    fused = gradients(fusion.fuse(attend, options={"target": "reference", "strict": True}), inputs)
    assert any(bool(tensor.isnan().any()) for tensor in eager)
    for got, want in zip(fused, eager, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_sizes_may_be_symbols() -> None:
    inputs = [tensor.requires_grad_() for tensor in heads()]
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(tensor, 2)
    graph, given = joint_graph(CANCELS["divided last"], inputs)
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.graph.nodes)
    assert spread(graph) == 1
    before = run(graph, given)
    drop_vanishing_gradients(graph)
    assert spread(graph) == 0
    for got, want in zip(run(graph, given), before, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
