"""`explain(..., measure=True)`: the time of each kernel and library call beside the predicted one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusion
import fusion.codegen.c.target
from fusion.codegen import targets
from fusion.inspect import measurement
from fusion.inspect.explanation import Explanation
from fusion.inspect.report import KernelReport
from fusion.lowering.errors import Unsupported

SLEEP = 0.02


@pytest.fixture
def tanh_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with a `tanh` take 20 ms more."""
    build: Callable[..., Callable[..., object]] = fusion.codegen.c.target.build_kernel

    def built(kernel: Any, source: str, unkept: Any) -> Callable[..., object]:
        launch = build(kernel, source, unkept)

        def slow(*args: Any) -> None:
            launch(*args)
            time.sleep(SLEEP)

        return slow if "tanh" in kernel.name else launch

    monkeypatch.setattr(fusion.codegen.c.target, "build_kernel", built)
    monkeypatch.setattr(targets, "_builders", {})  # the builds of this test are not for others


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock stands still: each measurement runs its call three times, and takes 7 µs."""
    runs: list[int] = []

    def median_time(
        call: Callable[[], object], device: torch.device, prepare: Callable[[], object] | None = None
    ) -> float:
        for _ in range(3):
            if prepare is not None:
                prepare()
            call()
        runs.append(3)
        return 7.0

    monkeypatch.setattr(
        measurement, "median_time", lambda call, device, prepare=None: median_time(call, device, prepare)
    )
    return runs


def measured(program: Callable[..., object], *inputs: object, **settings: Any) -> Explanation:
    return fusion.explain(program, measure=True, **settings)(*inputs)


def kernel_with(word: str, found: Explanation) -> KernelReport:
    (kernel,) = [kernel for kernel in found.kernels if word in kernel.name]
    return kernel


def two_kernels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.softmax(x, -1) @ w)


@pytest.mark.usefixtures("tanh_is_slow")
def test_a_slow_kernel_is_named() -> None:
    found = measured(two_kernels, torch.randn(64, 128), torch.randn(128, 32))
    slow, other = kernel_with("tanh", found), kernel_with("exp", found)
    assert slow.measured is not None and slow.measured >= SLEEP * 1e6
    assert other.measured is not None and other.measured > 0
    assert slow.predicted is not None and 0 < slow.predicted < 1e3
    assert slow in found.far_off and slow.ratio == slow.measured / slow.predicted
    (line,) = [line for line in str(found).splitlines() if "off by" in line and "tanh" in line]
    assert f"kernel {slow.name}, predicted {slow.predicted:.1f} µs, measured {slow.measured:.1f} µs" in line
    (extern,) = found.externs
    assert extern.measured is not None and extern.measured > 0
    assert f"measured {extern.measured:.1f} µs" in str(found)


def test_a_time_near_the_prediction_is_not_named(counted: list[int]) -> None:
    kernel = KernelReport("add", "", "c", (), 8, 8, 1, predicted=10.0, measured=19.9)
    assert not kernel.is_far_off
    far = KernelReport("add", "", "c", (), 8, 8, 1, predicted=10.0, measured=4.9)
    assert far.is_far_off and far.ratio == pytest.approx(0.49)
    assert KernelReport("add", "", "c", (), 8, 8, 1, predicted=None, measured=4.9).ratio is None


def test_each_step_is_measured_once_and_repeated_runs_count(counted: list[int]) -> None:
    """A product in chunks runs its kernels several times; the report has the sum."""

    def loss(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ w, t)

    given = torch.randn(280, 260, requires_grad=True), torch.randn(260, 1003), torch.randint(1003, (280,))
    found = measured(loss, *given, options={"workspace": 1 << 16})
    assert "in chunks" in str(found)
    times = [entry.measured for entry in (*found.kernels, *found.externs) if entry.measured is not None]
    assert len(times) >= len(found.kernels) > 0 and all(time % 7.0 == 0 for time in times)
    assert max(times) > 7.0
    assert 0 < len(counted) <= 2 * len(times)  # the last chunk has other sizes


def updated(weight: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    first.mul_(0.9).add_(gradient, alpha=0.1)
    weight.sub_(first * 0.5)
    return weight.sum()


def test_updates_in_place_happen_once(counted: list[int]) -> None:
    given = [torch.randn(64, 300, dtype=torch.float64) for _ in range(3)]
    wanted = [each.clone() for each in given]
    updated(*wanted)
    found = measured(updated, *given)
    assert any(kernel.measured for kernel in found.kernels) and counted
    for ours, theirs in zip(given, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_views_of_updated_memory_and_scatters(counted: list[int]) -> None:
    """A cache of which a part is written, and sums that are accumulated into an operand."""

    def program(cache: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        cache[2:5].add_(rows)
        return cache.index_add(0, index, rows).cumsum(1)

    given = torch.randn(10, 40), torch.randn(3, 40), torch.tensor([1, 1, 3])
    wanted_cache = given[0].clone()
    wanted = program(wanted_cache, *given[1:])
    results = torch.empty_like(wanted)

    def storing(cache: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, results: torch.Tensor) -> None:
        results.copy_(program(cache, rows, index))

    found = measured(storing, *given, results)
    assert counted and all(kernel.measured == 7.0 for kernel in found.kernels)
    torch.testing.assert_close(given[0], wanted_cache)
    torch.testing.assert_close(results, wanted)


def test_restored_memory_is_what_every_run_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repeated run of x ← x / 2 starts from the same numbers, in memory of its own at the same place."""
    seen: list[torch.Tensor] = []
    build: Callable[..., Callable[..., object]] = fusion.codegen.c.target.build_kernel

    def built(kernel: Any, source: str, unkept: Any) -> Callable[..., object]:
        launch = build(kernel, source, unkept)

        def noting(*args: Any) -> None:
            seen.append(args[0].clone())
            launch(*args)

        return noting

    monkeypatch.setattr(fusion.codegen.c.target, "build_kernel", built)
    monkeypatch.setattr(targets, "_builders", {})
    x = torch.randn(1000)
    before = x.clone()
    measured(lambda x: x.div_(2), x)
    assert len(seen) > 5 and all(torch.equal(each, before) for each in seen)
    torch.testing.assert_close(x, before / 2)


def test_random_numbers_are_drawn_once() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.bernoulli(x.sigmoid())

    x = torch.randn(256)
    fused = fusion.fuse(program)
    torch.manual_seed(3)
    fused(x)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    found = measured(program, x)
    assert torch.equal(torch.rand(3), wanted)
    assert all(extern.measured is not None for extern in found.externs if extern.name.startswith("aten"))


def test_backward_is_measured_and_gradients_are_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.LayerNorm(48))
    found = measured(model, torch.randn(16, 32))
    assert {graph.label for graph in found.graphs} == {"forward", "backward"}
    assert all(kernel.measured is not None and kernel.measured > 0 for kernel in found.kernels)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_symbolic_sizes() -> None:
    found = measured(lambda x: torch.softmax(x, -1), torch.randn(33, 70), dynamic=True)
    (kernel,) = found.kernels
    assert kernel.measured is not None and kernel.predicted is not None and kernel.measured > 0


def test_without_measuring_there_are_predictions_only() -> None:
    found = fusion.explain(two_kernels)(torch.randn(64, 128), torch.randn(128, 32))
    assert all(kernel.predicted is not None and kernel.predicted > 0 for kernel in found.kernels)
    assert all(entry.measured is None for entry in (*found.kernels, *found.externs))
    assert not found.far_off and "µs, measured" not in str(found)


def test_a_kernel_without_a_price_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object) -> float:
        raise Unsupported("nothing is known of its speed")

    monkeypatch.setattr("fusion.inspect.report.kernel_price", unknown)
    found = measured(lambda x: x.sin(), torch.randn(30))
    (kernel,) = found.kernels
    assert kernel.predicted is None and kernel.measured is not None and kernel.ratio is None
    assert "no price, measured" in str(found) and not found.far_off
