"""Times a program in eager and compiled, in one run (`fusion time`).

Input: a program with its inputs; output: the median wall-clock time of a call of each side, and the time of the first
call, which compiles, with empty caches.  The sides take turns, so that noise affects all of them; a GPU is waited for
before and after each call.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time as clock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from torch.utils import _pytree as pytree

import fusion
from fusion.calls.waiting import waiting
from fusion.cli.output import print_json, write_page
from fusion.cli.programs import CommandError, Prepared, prepared
from fusion.inspect.agreement import cotangent
from fusion.lowering.errors import brief

LEAST, MOST, ENOUGH = 5, 200, 2.0
"""Rounds at least and at most, and the seconds after which no more are started."""


@dataclass(slots=True)
class Side:
    """One way to run the program.

    Attributes:
        call: runs it once, with backward if asked.
        first: seconds of the first call with empty caches; None of eager.
        times: seconds of each later call.
    """

    name: str
    call: Callable[[], object]
    first: float | None = None
    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of its times, in seconds."""
        return median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile, in seconds."""
        first, _, third = quantiles(self.times, n=4)
        return first, third


def time(arguments: argparse.Namespace) -> int:
    """Print the times of each side; exit with 1 if nothing was compiled."""
    with torch.set_grad_enabled(arguments.train):
        case = prepared(arguments)
        device = torch.device(arguments.device)
        fused = fusion.fuse(case.program, **case.settings)
        sides = [_side("eager", case, case.program), _side("fusion", case, fused)]
        if arguments.compare is not None:
            sides.append(_side(arguments.compare, case, _compiled(arguments, case)))
        with waiting("timing"):
            for side in sides[1:]:
                side.first = _first(side, device)
            _measure(sides, device, arguments.rounds)
    report = fusion.report(fused)
    failures = [graph.failure for graph in report.graphs if graph.failure]
    fault = failures[0] if failures else "" if report.kernels else "no kernel was generated"
    lacking = f"not all of it was compiled: {fault}" if fault else ""
    text = "\n\n".join(filter(None, ["\n".join(_table(arguments, sides)), lacking]))
    page = write_page(arguments, report, good=not fault, text=text)
    if arguments.json:
        print_json({"program": arguments.program, "device": str(device), "fault": fault, "sides": _entries(sides)})
    else:
        print("\n\n".join(filter(None, [text, page])))
    return 1 if fault else 0


def _side(name: str, case: Prepared, program: Callable[..., object]) -> Side:
    return Side(name, lambda: _step(program, case))


def _step(program: Callable[..., object], case: Prepared) -> None:
    """Run a program, and backward where a result requires gradients, from the same cotangents."""
    results = [
        each for each in pytree.tree_leaves(program(*case.inputs, **case.kwargs)) if isinstance(each, torch.Tensor)
    ]
    starts = [each for each in results if each.requires_grad]
    if starts:
        torch.autograd.backward(starts, [_kept_cotangent(each) for each in starts])
    parameters = case.program.parameters() if isinstance(case.program, torch.nn.Module) else ()
    for leaf in (*case.leaves, *parameters):
        leaf.grad = None


_COTANGENTS: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}


def _kept_cotangent(result: torch.Tensor) -> torch.Tensor:
    """Return the cotangent of a result; it is drawn once, not in each timed call."""
    key = result.shape, result.dtype, result.device
    if key not in _COTANGENTS:
        _COTANGENTS[key] = cotangent(result)
    return _COTANGENTS[key]


def _compiled(arguments: argparse.Namespace, case: Prepared) -> Callable[..., object]:
    """Return the program, compiled by the other backend in the same mode."""
    mode, dynamic = case.settings["mode"], case.settings["dynamic"]
    compiled: Callable[..., object] = torch.compile(case.program, backend=arguments.compare, mode=mode, dynamic=dynamic)
    return compiled


def _first(side: Side, device: torch.device) -> float:
    """Return the seconds of a first call with empty caches.

    Raises:
        CommandError: it fails.
    """
    with empty_caches():
        start = clock.perf_counter()
        try:
            side.call()
        except Exception as error:  # whatever a compiler raises
            raise CommandError(f"{side.name} failed: {type(error).__name__}: {brief(error)}") from error
        _wait(device)
        return clock.perf_counter() - start


def _measure(sides: list[Side], device: torch.device, rounds: int | None) -> None:
    """Time calls of the sides in turn, after a warm-up call."""
    started = clock.perf_counter()
    for number in range((rounds or MOST) + 1):
        for side in sides:
            _wait(device)
            start = clock.perf_counter()
            side.call()
            _wait(device)
            if number:
                side.times.append(clock.perf_counter() - start)
        if rounds is None and number >= LEAST and clock.perf_counter() - started > ENOUGH:
            break


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Output ---------------------------------------------------------------------------------------------------------------


def _entries(sides: list[Side]) -> list[dict[str, object]]:
    eager = sides[0].median
    return [
        {
            "name": side.name,
            "median_s": side.median,
            "quartiles_s": side.quartiles,
            "times_as_fast_as_eager": eager / side.median,
            "first_call_s": side.first,
            "rounds": len(side.times),
        }
        for side in sides
    ]


def _table(arguments: argparse.Namespace, sides: list[Side]) -> list[str]:
    what = "forward and backward" if arguments.train else "forward"
    count = torch.get_num_threads()
    threads = f", {count} thread{'' if count == 1 else 's'}" if arguments.device == "cpu" else ""
    lines = [f"{arguments.program} on {arguments.device}{threads}, {what}; {len(sides[0].times)} rounds in turn", ""]
    lines.append(f"{'':<12}{'median':>12}{'quartiles':>26}{'of eager':>10}{'first call':>12}")
    for side in sides:
        low, high = side.quartiles
        first = "-" if side.first is None else f"{side.first:.2f} s"
        ratio = f"{sides[0].median / side.median:.2f}x"
        quartiles = f"{_shown(low)} to {_shown(high)}"
        lines.append(f"{side.name:<12}{_shown(side.median):>12}{quartiles:>26}{ratio:>10}{first:>12}")
    return lines


def _shown(seconds: float) -> str:
    """Return a time with its unit.

    >>> _shown(2.5e-5), _shown(0.0125), _shown(3.0)
    ('25.0 µs', '12.50 ms', '3.00 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


@contextmanager
def empty_caches() -> Iterator[None]:
    """Use empty, temporary cache directories of Fusion and TorchInductor within, so that a first call compiles."""
    variables = ("FUSION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ.get(name) for name in variables}
    with tempfile.TemporaryDirectory(prefix="fusion-cold-", ignore_cleanup_errors=True) as folder:
        try:
            for name in variables:
                os.environ[name] = os.path.join(folder, name.partition("_")[0].lower())
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
