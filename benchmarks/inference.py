"""Benchmarks forward passes on a GPU, wall clock: whole models, and short calls recorded as CUDA graphs.

Every system calls the same module on the same batch, alternating; results are compared with eager's and float64's
before anything is timed.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import fusion
from benchmarks import models
from benchmarks.clocks import wall_seconds_in_turn
from benchmarks.harness import Refused, check_generated, distance
from benchmarks.models import Batch, Model
from benchmarks.suite import print_rows

DEVICE = "cuda"
SYSTEMS = ("eager", "inductor", "fusion")
ALLOWED = 2.0
"""The largest error of a result, relative to eager's."""


@dataclass(frozen=True)
class Case:
    """A model under a mode of both compilers; in bfloat16, or with `autocast` in float32 under that."""

    model: Model
    mode: str | None = None
    autocast: bool = False

    @property
    def name(self) -> str:
        return self.model.name + (", autocast" if self.autocast else "")


def _linears() -> nn.Module:
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())))


def _convolutions() -> nn.Module:
    def block() -> tuple[nn.Module, ...]:
        return nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()

    return nn.Sequential(*(part for _ in range(6) for part in block()))


def _numbers(*shape: int) -> Callable[[str], Batch]:
    return lambda device: {"images": torch.randn(*shape, device=device)}


SHORT = "reduce-overhead"
CASES = (
    Case(Model("GPT-2 8x1024", models.gpt2, models.tokens(8, 1024, 50257), models.logits)),
    Case(Model("ResNet-50 64x224x224", models.resnet50, models.images(64), models.classes), autocast=True),
    Case(Model("ConvNeXt-T 64x224x224", models.convnext_tiny, models.images(64), models.classes)),
    Case(Model("GPT-2 one token", models.gpt2, models.tokens(1, 1, 50257), models.logits), SHORT),
    Case(Model("six linear layers 64x512", _linears, _numbers(64, 512), models.classes), SHORT),
    Case(Model("six convolutions 8x64x28x28", _convolutions, _numbers(8, 64, 28, 28), models.classes), SHORT),
)


def run(*, only: str, quick: bool) -> int:
    """Run all cases whose name contains `only`; return 1 if one was refused."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds a call, by the clock")
    print(f"{'model':<34}{'mode':<18}" + "".join(f"{system:>10}" for system in SYSTEMS) + f"{'error':>8}")
    rounds = 10 if quick else 50
    return print_rows((case.name, partial(measured, case, DEVICE, rounds)) for case in CASES if only in case.name)


def measured(case: Case, device: str, rounds: int) -> Iterator[str]:
    """Yield the row of one case.

    Raises:
        Refused: a wrong result, or no generated kernel.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = case.model.make().to(device).eval()
    if not case.autocast:
        module.bfloat16()
    wide = copy.deepcopy(module).double()
    batch = case.model.batch(device)
    backend = fusion.Backend(fusion.Options.read(mode=case.mode))
    programs = {
        "eager": case.model.call,
        "inductor": torch.compile(case.model.call, backend="inductor", mode=case.mode),
        "fusion": torch.compile(case.model.call, backend=backend),
    }

    def call(program: Callable[..., Tensor]) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=case.autocast):
                return program(module, batch)

        return forward

    calls = {system: call(program) for system, program in programs.items()}
    with torch.no_grad():
        exact = case.model.call(wide, batch)
    del wide
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        errors = {system: distance(forward(), exact) for system, forward in calls.items()}
    check_generated(backend)
    if not errors["fusion"] <= ALLOWED * errors["eager"]:
        raise Refused(f"errors {errors}")
    for forward in calls.values():
        for _ in range(4):
            forward()
    samples = wall_seconds_in_turn(calls, device, rounds)
    text = f"{case.name:<34}{case.mode or 'default':<18}"
    text += "".join(f"{statistics.median(values) * 1e3:>10.3f}" for values in samples.values())
    yield f"{text}{errors['fusion'] / errors['eager']:>7.2f}x"
