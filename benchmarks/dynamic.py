"""Benchmarks dynamic sizes and process starts: GPT-2 of a few layers, in three groups.

    sizes   the time of a call with code for any size, against code for its own size; traced at the first size
    loop    the number of compilations in calls of fifty sizes, each result checked
    start   seconds until the first training step is done, in a process with empty caches and in the next one

On a GPU in bfloat16, wall clock; without one, a narrow model in float32.
"""

from __future__ import annotations

import copy
import random
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend

import fusion
from benchmarks import models
from benchmarks.clocks import wall_seconds_in_turn
from benchmarks.harness import Refused, check_generated, distance, start_seconds
from benchmarks.models import Batch
from benchmarks.suite import print_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SYSTEMS = ("inductor", "fusion")
ALLOWED = 2.0
"""The largest error of a result, relative to eager's."""
MOST = 2
"""The most compilations of a loop: for the first size, and for all others."""


@dataclass(frozen=True)
class Scale:
    """The size and dtype of the model, and the rows and lengths of the timed calls."""

    width: int
    heads: int
    layers: int
    words: int
    dtype: torch.dtype
    timed: tuple[tuple[int, int], ...]
    most_rows: int
    longest: int

    def model(self) -> nn.Module:
        sizes = {"n_embd": self.width, "n_head": self.heads, "n_layer": self.layers, "vocab_size": self.words}
        return models.gpt2(**sizes).to(self.dtype)

    def batch(self, device: str, rows: int, length: int) -> Batch:
        return models.tokens(rows, length, self.words)(device)

    def changing(self, count: int) -> list[tuple[int, int]]:
        """Return pairs of rows and lengths; both differ from one pair to the next, so that Dynamo makes them dynamic.

        Neither is 1, for which Dynamo specialises, and no length is a number of rows: it unifies equal sizes.
        """
        lengths = random.Random(0).sample(range(self.most_rows + 1, self.longest + 1), count)
        return [(2 + place % (self.most_rows - 1), length) for place, length in enumerate(lengths)]


FULL = Scale(768, 12, 4, 50257, torch.bfloat16, ((8, 1024), (8, 1000), (4, 512), (2, 128)), 8, 1024)
NARROW = Scale(128, 4, 2, 512, torch.float32, ((4, 128), (4, 100), (2, 64)), 6, 128)
SCALE = FULL if DEVICE == "cuda" else NARROW


class Counted:
    """A Dynamo backend that counts the graphs that it compiles."""

    def __init__(self, backend: Callable[..., Callable[..., object]]) -> None:
        self.backend, self.count = backend, 0

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        self.count += 1
        return self.backend(graph, inputs)


# The calls ------------------------------------------------------------------------------------------------------------


Call = Callable[[nn.Module, Batch], Tensor]


def forward(program: Call, model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return program(model, batch)


def step(program: Call, model: nn.Module, batch: Batch) -> Tensor:
    model.zero_grad()
    loss = program(model, batch)
    loss.backward()
    return loss.detach()


KINDS: dict[str, tuple[Callable[[Call, nn.Module, Batch], Tensor], Call]] = {
    "forward": (forward, models.logits),
    "step": (step, models.own_loss),
}


class Judge:
    """Computes the errors of one kind of call of a model, against its copy in float64."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.run, self.call = KINDS[kind]
        self.model, self.wide = model, copy.deepcopy(model).double()

    def ratio(self, program: Call, batch: Batch) -> float:
        """Return the error of a program relative to eager's: of the result, or of all gradients if that is more."""
        exact = self._result_and_gradients(self.call, self.wide, batch)
        eager, ours = (self._result_and_gradients(each, self.model, batch) for each in (self.call, program))
        triples = zip(ours, eager, exact, strict=True)
        return _largest([distance(result, right) / (distance(near, right) + 1e-6) for result, near, right in triples])

    def _result_and_gradients(self, program: Call, model: nn.Module, batch: Batch) -> list[Tensor]:
        result = self.run(program, model, batch).clone()
        gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [result, torch.cat(gradients)] if gradients else [result]


def _largest(numbers: Sequence[float]) -> float:
    """Return the largest number; NaN if one is."""
    return torch.tensor(numbers).max().item()


def _alone(call: Call) -> Call:
    """Copy a function with its code: Dynamo caches compilations per code object, and only a few of each."""
    assert isinstance(call, FunctionType)
    return FunctionType(call.__code__.replace(), call.__globals__, call.__name__)


# Sizes ----------------------------------------------------------------------------------------------------------------


def sizes(kind: str, scale: Scale, device: str, rounds: int) -> Iterator[str]:
    """Yield rows of the table for one kind of call, one per size.

    Raises:
        Refused: a wrong result, a recompilation, or no generated kernel.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = scale.model().to(device)
    judge = Judge(kind, model)
    generated = fusion.Backend(fusion.Options.read())
    backends = {"inductor": lookup_backend("inductor"), "fusion": generated}
    counted = {system: Counted(backends[system]) for system in SYSTEMS}
    any_size = {system: torch.compile(_alone(judge.call), backend=counted[system], dynamic=True) for system in SYSTEMS}
    for rows, length in scale.timed:
        batch = scale.batch(device, rows, length)
        programs: dict[str, Call] = {"eager": judge.call}
        for system in SYSTEMS:
            programs[f"{system} fixed"] = torch.compile(_alone(judge.call), backend=backends[system], dynamic=False)
            programs[f"{system} any"] = any_size[system]
        for name, program in programs.items():
            if not (ratio := judge.ratio(program, batch)) <= ALLOWED and name.startswith("fusion"):
                raise Refused(f"{kind} {rows}x{length}: error {ratio:.2f} of eager's, {name}")
        check_generated(generated)
        if counted["fusion"].count > 1:
            raise Refused(f"{kind} {rows}x{length}: compiled again")
        calls = {name: partial(judge.run, program, model, batch) for name, program in programs.items()}
        for each in calls.values():
            for _ in range(4):
                each()
        samples = wall_seconds_in_turn(calls, device, rounds)
        medians = {name: statistics.median(values) * 1e3 for name, values in samples.items()}
        text = f"{kind + f' {rows}x{length}':<20}{medians['eager']:>9.3f}"
        for system in SYSTEMS:
            fixed, free = medians[f"{system} fixed"], medians[f"{system} any"]
            text += f"{fixed:>16.3f}{free:>14.3f}{free / fixed:>7.2f}x"
        yield text


# Loops ----------------------------------------------------------------------------------------------------------------


def loop(kind: str, system: str, scale: Scale, device: str, count: int) -> str:
    """Call `count` sizes, and return a row of the table: compilations, and the largest error relative to eager's.

    Raises:
        Refused: a wrong result or too many compilations by Fusion, or no generated kernel.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    judge = Judge(kind, scale.model().to(device))
    generated = fusion.Backend(fusion.Options.read())
    counted = Counted(generated if system == "fusion" else lookup_backend("inductor"))
    program = torch.compile(_alone(judge.call), backend=counted)
    batches = (scale.batch(device, rows, length) for rows, length in scale.changing(count))
    worst = _largest([judge.ratio(program, batch) for batch in batches])
    if system == "fusion":
        check_generated(generated)
        if not worst <= ALLOWED or counted.count > MOST:
            raise Refused(f"{kind}: error {worst:.2f} of eager's, {counted.count} compilations")
    return f"{kind + f', {count} sizes':<20}{system:>10}{counted.count:>14}{worst:>12.2f}x"


# Starts ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The first training step of a process, for `benchmarks.cold`."""

    name: str = "start"

    def prepared(self, device: str) -> Callable[[Callable[..., Callable[..., Tensor]]], object]:
        """Return a function that runs the step once, with its argument as the compiler."""
        rows, length = SCALE.timed[0]
        model, batch = SCALE.model().to(device), SCALE.batch(device, rows, length)
        return lambda compiled: step(compiled(models.own_loss), model, batch)


CASES = (Start(),)


def run(*, only: str, quick: bool) -> int:
    """Run the groups whose name contains `only`; return 1 if one was refused."""
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; GPT-2 of {SCALE.layers} layers, {SCALE.width} wide, {SCALE.dtype}")
    groups: dict[str, Callable[[], Iterator[str]]] = {
        "sizes": partial(_sizes, 7 if quick else 30),
        "loop": partial(_loops, 10 if quick else 50),
        "start": _starts,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        return print_rows((name, rows) for name, rows in groups.items() if only in name)


def _sizes(rounds: int) -> Iterator[str]:
    yield f"{'milliseconds a call':<20}{'eager':>9}" + "".join(
        f"{system + ' fixed':>16}{'any':>14}{'':>8}" for system in SYSTEMS
    )
    for kind in KINDS:
        yield from sizes(kind, SCALE, DEVICE, rounds)


def _loops(count: int) -> Iterator[str]:
    yield f"{'loop':<20}{'':>10}{'compilations':>14}{'error':>13}"
    for kind in KINDS:
        for system in SYSTEMS:
            yield loop(kind, system, SCALE, DEVICE, count)


def _starts() -> Iterator[str]:
    yield f"{'seconds to a step':<20}{'':>10}{'empty caches':>14}{'filled':>13}"
    for system in SYSTEMS:
        cold, warm = start_seconds("dynamic", CASES[0].name, system)
        yield f"{'first step':<20}{system:>10}{cold:>14.2f}{warm:>13.2f}"
