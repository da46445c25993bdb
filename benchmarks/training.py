"""Benchmarks training steps of whole models on a GPU, wall clock: forward, loss and backward, and peak memory.

The models are those of `transformers` and `torchvision`, with random weights, and those of `zoo.py`, in one mode.
Every system trains the same parameters, alternating; gradients are compared with eager's and float64's beforehand.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import fusion
from benchmarks import models
from benchmarks.clocks import peak_bytes, wall_seconds_in_turn
from benchmarks.harness import Refused, check_generated
from benchmarks.models import Batch, Model
from benchmarks.suite import print_rows
from benchmarks.zoo import ZOO

DEVICE = "cuda"
SYSTEMS = ("eager", "inductor", "fusion")
ALLOWED = 2.0
"""The largest error of all gradients together, relative to eager's."""

MODELS = (
    Model("GPT-2 8x1024", models.gpt2, models.tokens(8, 1024, 50257), models.own_loss),
    Model("BERT 16x512", models.bert, models.tokens(16, 512, 30522, masked=True), models.own_loss),
    Model("ResNet-50 64x224x224", models.resnet50, models.images(64), models.classified),
    Model("ConvNeXt-T 64x224x224", models.convnext_tiny, models.images(64), models.classified),
    *ZOO,
)


def run(*, only: str, quick: bool) -> int:
    """Run all models whose name contains `only`; return 1 if one was refused."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16, milliseconds a step, by the clock")
    print(f"{'model':<24}{'mode':<18}" + "".join(f"{system:>10}{'MiB':>8}" for system in SYSTEMS) + f"{'error':>8}")
    return print_rows(
        (f"{model.name}, {mode or 'default'}", partial(measured, model, mode, DEVICE, rounds=10 if quick else 30))
        for model in MODELS
        if only in model.name
        for mode in ((None,) if model in ZOO else (None, "reduce-overhead"))
    )


def measured(model: Model, mode: str | None, device: str, rounds: int) -> Iterator[str]:
    """Yield the row of one model under one mode of both compilers.

    Raises:
        Refused: wrong gradients, or no generated kernel.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = model.make().to(device).bfloat16().train()
    batch = model.batch(device)
    backend = fusion.Backend(fusion.Options.read(mode=mode))
    losses = {
        "eager": model.call,
        "inductor": torch.compile(model.call, backend="inductor", mode=mode),
        "fusion": torch.compile(model.call, backend=backend),
    }
    steps = {system: training_step(module, batch, loss) for system, loss in losses.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        computed = {}
        for system, step in steps.items():
            step()
            computed[system] = gradients(module)
    check_generated(backend)
    wide = copy.deepcopy(module).double()
    training_step(wide, batch, model.call)()
    exact = gradients(wide)
    del wide
    errors = {system: gradient_distance(given, exact) for system, given in computed.items()}
    computed.clear()
    if not errors["fusion"] <= ALLOWED * errors["eager"]:
        raise Refused(f"errors {errors}")
    peaks = {}
    for system, step in steps.items():
        for _ in range(4):
            step()
        module.zero_grad()
        peaks[system] = peak_bytes(step) if device == "cuda" else 0
    samples = wall_seconds_in_turn(steps, device, rounds)
    text = f"{model.name:<24}{mode or 'default':<18}"
    for system, values in samples.items():
        text += f"{statistics.median(values) * 1e3:>10.2f}{peaks[system] / 2**20:>8.0f}"
    yield f"{text}{errors['fusion'] / errors['eager']:>7.2f}x"


def training_step(module: nn.Module, batch: Batch, loss: Callable[..., Tensor]) -> Callable[[], None]:
    """Return a call that computes the module's gradients anew."""

    def step() -> None:
        module.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        loss(module, batch).backward()

    return step


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the module's gradients in float64, and clear them."""
    taken = [p.grad.double() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return taken


def gradient_distance(values: list[Tensor], exact: list[Tensor]) -> float:
    """Return the norm of the error of all gradients, relative to their own."""
    squares = sum((a - b).square().sum().item() for a, b in zip(values, exact, strict=True))
    return float(squares / sum(b.square().sum().item() for b in exact)) ** 0.5
