"""Launches in one call: the same results, memory and errors as one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fusion
from fusion.compilation import compile as compilation
from fusion.runtime import sequences

OPTIONS = {"target": "c", "strict": True, "graph_cache": False}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of what each module calls after its launches were joined."""
    seen: list[list[str]] = []

    def noted(module: fx.GraphModule) -> fx.GraphModule:
        result = sequences.joined(module)
        seen.append([getattr(node.target, "__name__", str(node.target)) for node in result.graph.nodes])
        return result

    monkeypatch.setattr(compilation, "joined", noted)
    return seen


def steps(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Several kernels: reductions along both axes, one after the other."""
    a = torch.softmax(x, -1)
    b = F.layer_norm(a * a.sum(0), a.shape[-1:])
    c = b / b.amax(0)
    return (c.cumsum(0) * w).sum(-1), a


def same(f: Callable[..., object], *given: Tensor) -> None:
    """Compare with eager, twice: nothing may be left of a call."""
    fused = fusion.fuse(f, options=OPTIONS)
    for _ in range(2):
        torch.testing.assert_close(fused(*given), f(*given), rtol=1e-4, atol=1e-5)


def launches(names: list[str]) -> list[str]:
    """The calls that launch several kernels."""
    return [name for name in names if name.startswith("launch_")]


def test_launches_in_a_row_are_one_call(joined):
    same(steps, torch.randn(37, 50), torch.randn(50))
    assert len(launches(joined[-1])) == 1 and joined[-1].count("empty") == 2, joined


def test_other_steps_are_between_calls(joined):
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first, a = steps(x, w)
        q = torch.linalg.qr(a).R.abs()
        return first, *steps(q, w)

    same(f, torch.randn(60, 50), torch.randn(50))
    assert len(launches(joined[-1])) == 2, joined


def test_large_tensors_are_freed_as_early_as_they_can_be(joined):
    rows = sequences.MOST_ALLOCATED // (50 * 4) + 1
    fusion.fuse(steps, options=OPTIONS)(torch.randn(rows, 50), torch.randn(50))
    assert not launches(joined[-1]), joined


def test_sequences_allocate_little_in_all(joined):
    """Large results would be allocated before the first launch, when inputs are not freed yet."""
    rows = sequences.MOST_ALLOCATED // (50 * 4 * 4) + 1

    def f(x: Tensor) -> tuple[Tensor, ...]:
        a = torch.softmax(x, -1)
        b = torch.softmax(a * a.sum(0), -1)
        return a, b, torch.softmax(b * b.sum(0), -1), a * b.amax(0)

    fusion.fuse(f, options=OPTIONS)(torch.randn(rows, 50))
    assert not launches(joined[-1]), joined


def test_inputs_are_changed_and_results_are_views_as_in_eager(joined):
    def f(x: Tensor, kept: Tensor) -> Tensor:
        first, a = steps(x, x[0])
        kept.mul_(2).add_(first)
        return a.view(2, -1).t()

    x = torch.randn(40, 50)
    kept, expected = torch.randn(40), None
    expected = kept.clone()
    got, eager = fusion.fuse(f, options=OPTIONS)(x, kept), f(x, expected)
    torch.testing.assert_close(got, eager)
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)
    assert got.stride() == eager.stride() and launches(joined[-1])


def test_a_failed_check_is_raised_with_its_line(joined):
    def f(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
        first, a = steps(x, w)
        scaled = (first * 0 + index).long()
        return torch.softmax(a[scaled].cumsum(0), 0).sum(-1)

    x, w = torch.randn(40, 50), torch.randn(50)
    fused = fusion.fuse(f, options=OPTIONS)
    torch.testing.assert_close(fused(x, torch.tensor(39), w), f(x, torch.tensor(39), w), rtol=1e-4, atol=1e-5)
    assert launches(joined[-1])
    with pytest.raises(IndexError, match=r"index 40 is out of bounds .*\n  at: test_sequences.py"):
        fused(x, torch.tensor(40), w)


def test_gradients_pass_through_joined_launches(joined):
    x, w = torch.randn(37, 50, requires_grad=True), torch.randn(50, requires_grad=True)
    fused = fusion.fuse(steps, options=OPTIONS)
    got = torch.autograd.grad(sum(result.square().sum() for result in fused(x, w)), (x, w))
    expected = torch.autograd.grad(sum(result.square().sum() for result in steps(x, w)), (x, w))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
