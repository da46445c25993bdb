"""Optimizer steps as one compiled function: five of them leave the weights where eager's do, in a few launches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusion
from fusion.backend import Backend
from fusion.options import Options

Parameters = list[nn.Parameter]
optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd_nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_dampened": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, maximize=True, foreach=False),
    "adam": lambda p: optim.Adam(p, lr=0.01, foreach=True),
    "adam_loop": lambda p: optim.Adam(p, lr=0.01, foreach=False),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw_tensor_rate": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, foreach=True),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5, foreach=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, foreach=True),
    "lion": lambda p: Lion(p, lr=0.01),
}
LAUNCHES = {"sgd": 1, "sgd_momentum": 1, "sgd_nesterov": 1, "adam": 3, "adamw": 3, "adamw_amsgrad": 3, "rmsprop": 1}
"""The greatest number of kernels for a step after the first, for all leaves together."""


class Lion(torch.optim.Optimizer):
    """Sign of an interpolation between gradient and momentum (Chen et al., 2023, algorithm 2)."""

    def __init__(self, parameters: Parameters, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_((mean * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                mean.mul_(second).add_(p.grad, alpha=1 - second)


def leaves() -> Parameters:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (6,), (3, 6), (3,), (2, 1, 3))]


def set_gradients(parameters: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps(name: str) -> None:
    mine, yours = leaves(), leaves()
    eager, compiled = OPTIMIZERS[name](mine), OPTIMIZERS[name](yours)
    backend = Backend(Options(strict=True))
    step = torch.compile(compiled.step, backend=backend)
    for k in range(5):
        set_gradients(mine, k)
        set_gradients(yours, k)
        eager.step()
        step()
    for a, b in zip(mine, yours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    for a, b in zip(mine, yours, strict=True):
        for key, value in eager.state[a].items():
            torch.testing.assert_close(
                torch.as_tensor(compiled.state[b][key]), torch.as_tensor(value), rtol=1e-5, atol=1e-6
            )
    last = backend.reports[-1]
    assert not last.failure and last.kernels
    if name in LAUNCHES:
        assert len(last.kernels) <= LAUNCHES[name], str(last)


def errors_of_steps(name: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance of three compiled steps from float64, and twice eager's with a rounding of the weights.

    The weights have float32: eager's own roundings may cancel.  (A factor 1 - 0.999**step in float32 is off by 6e-5.)
    """
    weights: dict[str, torch.Tensor] = {}
    for how in ("exact", "eager", "compiled"):
        zeros = torch.zeros(40, dtype=torch.float64 if how == "exact" else torch.float32, device=device)
        parameter = nn.Parameter(zeros)
        step = getattr(optim, name)([parameter], lr=0.01).step
        if how == "compiled":
            step = torch.compile(step, backend=Backend(Options(strict=True)))
        for k in range(3):
            gradient = torch.randn(40, generator=torch.Generator().manual_seed(k))
            parameter.grad = gradient.to(zeros)
            step()
        weights[how] = parameter.detach().double()
    error, own = ((weights[how] - weights["exact"]).norm() for how in ("compiled", "eager"))
    return error, 2 * own + torch.finfo(torch.float32).eps * weights["exact"].norm()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam"])
def test_how_far_running_means_have_come_is_exact(name: str) -> None:
    """A compiled step has 1 - 0.999**step in float32, where eager has it in float64."""
    error, allowed = errors_of_steps(name, "cpu")
    assert error <= allowed


def test_by_name_and_with_a_schedule() -> None:
    mine, yours = leaves(), leaves()
    pairs = []
    for parameters in (mine, yours):
        optimizer = optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False)
        pairs.append((optimizer, optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))
    (eager, plan), (compiled, other_plan) = pairs
    step = torch.compile(compiled.step, backend="fusion", options={"strict": True})
    for k in range(3):
        set_gradients(mine, k)
        set_gradients(yours, k)
        eager.step()
        plan.step()
        step()
        other_plan.step()
    for a, b in zip(mine, yours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


SCHEDULED = {
    "SGD": lambda parameters, **settings: optim.SGD(parameters, lr=0.1, momentum=0.9, **settings),
    "RMSprop": lambda parameters, **settings: optim.RMSprop(parameters, lr=0.1, **settings),
    "Adam": lambda parameters, **settings: optim.Adam(parameters, lr=0.1, **settings),
    "Adagrad": lambda parameters, **settings: optim.Adagrad(parameters, lr=0.1, **settings),
    "Adamax": lambda parameters, **settings: optim.Adamax(parameters, lr=0.1, **settings),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_changes_the_learning_rate_and_nothing_is_compiled_again(name: str, foreach: bool) -> None:
    """Once for the first rate, and once for any: Dynamo gives up after a few.  (Earlier releases trace each rate.)"""
    mine, yours = leaves(), leaves()
    optimizers = [SCHEDULED[name](parameters, foreach=foreach) for parameters in (mine, yours)]
    plans = [optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in optimizers]
    backend = Backend(Options(strict=True))
    step, counts = torch.compile(optimizers[1].step, backend=backend), []
    for k in range(5):
        set_gradients(mine, k)
        set_gradients(yours, k)
        optimizers[0].step()
        step()
        for plan in plans:
            plan.step()
        counts.append(len(backend.reports))
    for a, b in zip(mine, yours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert torch.__version__ < "2.13" or counts[2:] == [counts[2]] * 3
    assert all(report.kernels and not report.failure for report in backend.reports)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_factors_that_change(dtype: torch.dtype) -> None:
    """Each factor is an operand of a product, in one kernel with all the rest; 16-bit floats are rounded once."""

    def update(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float) -> torch.Tensor:
        y = x.add(a, alpha=factor).sub(b, alpha=factor * 2) + factor
        y.addcmul_(a, b, value=factor).addcdiv_(a, b.abs() + 1, value=-factor)
        return torch.addcmul(y, a, b, value=factor) + torch.addcdiv(y, a, b.abs() + 1, value=factor)

    fused = fusion.fuse(update, options={"strict": True})
    before = len(fusion.report(fused).graphs)  # of other dtypes
    given = [torch.linspace(-2, 2, 21).view(3, 7).roll(k, 1).to(dtype) for k in range(3)]
    for factor in (0.3, 0.7, -1.1, 2.5):
        actual, wide = fused(*given, factor), update(*(tensor.double() for tensor in given), factor)
        error, own = ((result.double() - wide).abs().max() for result in (actual, update(*given, factor)))
        assert error <= 2 * own + 1e-6
    graphs = fusion.report(fused).graphs[before:]
    assert len(graphs) == 2 and all(len(graph.kernels) == 1 and not graph.externs for graph in graphs)


def test_a_compiled_training_step() -> None:
    """Forward and backward from one fused model, clipping and the step compiled, against eager."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    twin = copy.deepcopy(net)
    fused = fusion.fuse(twin, options={"strict": True})
    eager, compiled = (optim.AdamW(n.parameters(), lr=0.01, foreach=True) for n in (net, twin))

    def finish(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True)
        optimizer.step()

    fused_finish = fusion.fuse(finish, options={"strict": True})
    for k in range(4):
        torch.manual_seed(k)
        x, y = torch.randn(5, 6), torch.randn(5, 2)
        for model, optimizer, finisher in ((net, eager, finish), (fused, compiled, fused_finish)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            finisher(optimizer, list(model.parameters()))
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
