"""CUDA graphs on a device: eager's numbers at every call, after any change since the recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion

pytestmark = pytest.mark.gpu


def recorded(target: Callable[..., Any]) -> Callable[..., Any]:
    return fusion.fuse(target, mode="reduce-overhead", options={"strict": True})


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(33, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 7)).cuda()


def notes(fused: Callable[..., Any]) -> list[str]:
    return [note for graph in fusion.report(fused).graphs for note in graph.notes]


def graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a step after it has run, as PyTorch's documentation of CUDA graphs asks for."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_inference_of_several_sizes() -> None:
    plain = model().eval()
    fused = recorded(plain)
    with torch.no_grad():
        for rows in (4, 4, 4, 9, 9, 17, 17, 4, 17):
            x = torch.randn(rows, 33, device="cuda")
            torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)
    assert set(notes(fused)) == {"recorded as a CUDA graph"}


def test_a_launch_is_one_call_once_recorded() -> None:
    plain = model().eval()
    fused = recorded(plain)
    x = torch.randn(4, 33, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            fused(x)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            fused(x)
            torch.cuda.synchronize()
    launches = [event.count for event in profile.key_averages() if "GraphLaunch" in event.key]
    assert launches == [1]


def test_training_with_an_optimizer() -> None:
    torch.manual_seed(0)
    plain, other = model(), model()
    other.load_state_dict(plain.state_dict())
    fused = recorded(other)
    for net, run in ((plain, plain), (other, fused)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(6):
            x, y = torch.randn(12, 33, device="cuda"), torch.randint(7, (12,), device="cuda")
            optimizer.zero_grad()
            nn.functional.cross_entropy(run(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert notes(fused) == ["recorded as a CUDA graph"] * 2


def test_gradients_that_accumulate() -> None:
    """Into existing gradients: results of a backward are in memory that the next step writes."""
    plain = model()
    inputs = [torch.randn(12, 33, device="cuda") for _ in range(5)]
    fused = recorded(plain)

    def gradients(run: Callable[..., Any]) -> list[Tensor]:
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for x in inputs:
            run(x).square().sum().backward()
        return [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]

    for ours, theirs in zip(gradients(fused), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_second_backward_through_a_graph_that_is_kept() -> None:
    plain = model()
    fused = recorded(plain)
    targets = torch.randint(7, (12,), device="cuda")
    for _ in range(4):
        x = torch.randn(12, 33, device="cuda")
        loss = nn.functional.cross_entropy(fused(x), targets)
        first = [each.clone() for each in torch.autograd.grad(loss, list(plain.parameters()), retain_graph=True)]
        second = torch.autograd.grad(loss, list(plain.parameters()))
        expected = torch.autograd.grad(nn.functional.cross_entropy(plain(x), targets), list(plain.parameters()))
        for each, again, theirs in zip(first, second, expected, strict=True):
            torch.testing.assert_close(each, again, rtol=0, atol=0)
            torch.testing.assert_close(each, theirs, rtol=1e-3, atol=1e-4)


def test_parameters_that_move() -> None:
    plain = model().eval()
    fused = recorded(plain)
    x = torch.randn(4, 33, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            fused(x)
        for parameter in plain.parameters():
            parameter.data = torch.randn_like(parameter)
        for _ in range(3):
            torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)


def test_inputs_that_are_not_aligned() -> None:
    fused = recorded(lambda x: (x * 2).softmax(-1))
    memory = torch.randn(4 * 33 + 3, device="cuda")
    for start in (0, 1, 2, 3, 0, 1):
        x = memory[start : start + 4 * 33].view(4, 33)
        torch.testing.assert_close(fused(x), (x * 2).softmax(-1))


def test_random_numbers_differ_between_calls() -> None:
    fused = recorded(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(3)
    drawn = [fused(x).clone() for _ in range(5)]
    torch.manual_seed(3)
    again = [fused(x).clone() for _ in range(5)]
    assert len({tuple(each.tolist()) for each in drawn}) == 5
    assert all(torch.equal(first, second) for first, second in zip(drawn, again, strict=True))
    assert all(0.4 < each.count_nonzero() / 1000 < 0.6 for each in drawn)


def test_random_numbers_of_calls_that_record() -> None:
    """Each size is captured at its second call, whose random numbers once repeated the first call's."""
    fused = recorded(lambda x: nn.functional.dropout(x, 0.5))
    for size in range(100, 116):
        x = torch.ones(size, device="cuda")
        torch.manual_seed(size)
        drawn = [fused(x).clone() for _ in range(3)]
        torch.manual_seed(size)
        again = [fused(x).clone() for _ in range(3)]
        assert len({tuple(each.tolist()) for each in drawn}) == 3
        assert all(torch.equal(first, second) for first, second in zip(drawn, again, strict=True))


def test_a_step_that_ends_in_one_program() -> None:
    """Programs that count themselves: each captured launch has counters of its own."""
    fused = recorded(lambda x: (x.exp().mean(), (x * x).mean()))
    for _ in range(5):
        x = torch.randn(300, 500, device="cuda")
        torch.testing.assert_close(fused(x), (x.exp().mean(), (x * x).mean()))


class Counter(nn.Module):
    """A buffer that each call changes."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 5, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return self.total * 2


def test_buffers_are_changed_in_place() -> None:
    plain = Counter()
    fused = recorded(plain)
    total = torch.zeros(3, 5, device="cuda")
    for _ in range(5):
        x = torch.randn(3, 5, device="cuda")
        total += x
        torch.testing.assert_close(fused(x), total * 2)
        torch.testing.assert_close(plain.total, total)
    assert notes(fused) == ["recorded as a CUDA graph"]


def test_inputs_that_are_changed_are_not_recorded() -> None:
    fused = recorded(lambda x: x.add_(1).sum())
    for _ in range(3):
        x = torch.zeros(3, 5, device="cuda")
        assert fused(x) == 15 and x.sum() == 15
    assert "in place" in notes(fused)[0]


def test_tensors_that_stay_where_they_are() -> None:
    """A cache that the caller has marked is updated in place, at a position from a tensor."""
    cache = torch.zeros(1, 2, 16, 8, device="cuda")
    torch._dynamo.mark_static_address(cache)

    def decode(x: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(2, position, x)
        scores = (x @ cache.transpose(-1, -2)).masked_fill(torch.arange(16, device="cuda") > position, float("-inf"))
        return scores.softmax(-1) @ cache

    fused = recorded(decode)
    known = torch.zeros_like(cache)
    for step in range(8):
        x = torch.randn(1, 2, 1, 8, device="cuda")
        actual = fused(x, torch.tensor([step], device="cuda"))
        known[:, :, step] = x[:, :, 0]
        expected = (x @ known[:, :, : step + 1].transpose(-1, -2)).softmax(-1) @ known[:, :, : step + 1]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, known)
    assert notes(fused) == ["recorded as a CUDA graph"]


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_captured_step_overwrites_what_its_forward_saved(scale: float) -> None:
    """The gradient of the logits is made in forward, and scaled in its own memory at each replay."""
    logits = torch.randn(512, 40000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(40000, (512,), device="cuda")
    loss = fusion.fuse(nn.functional.cross_entropy, options={"strict": True})

    def step() -> None:
        logits.grad = None
        (loss(logits, labels) * scale).backward()

    captured = graph_of(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        captured.replay()
        torch.cuda.synchronize()
    assert not [event.name for event in profile.events() or () if "Memcpy" in event.name]
    for _ in range(2):
        with torch.no_grad():
            logits.normal_()
        captured.replay()
        exact = logits.detach().double().requires_grad_()
        (nn.functional.cross_entropy(exact, labels) * scale).backward()
        assert logits.grad is not None and exact.grad is not None
        error = (logits.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < 4e-3


def test_a_backward_captured_by_itself_copies_what_forward_saved() -> None:
    """It can be replayed again on the same tensors."""
    logits = torch.randn(512, 40000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(40000, (512,), device="cuda")
    loss = fusion.fuse(nn.functional.cross_entropy, options={"strict": True})
    results: list[Tensor] = []

    def forward() -> None:
        results[:] = [loss(logits, labels)]

    def backward() -> Tensor:
        return torch.autograd.grad(results[0] * 3, logits)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward()
            first = backward()
    torch.cuda.synchronize()
    forward_graph, backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward_graph, stream=stream):
        forward()
    with torch.cuda.graph(backward_graph, pool=forward_graph.pool(), stream=stream):
        gradient = backward()
    forward_graph.replay()
    for _ in range(3):
        backward_graph.replay()
        torch.testing.assert_close(gradient, first)
