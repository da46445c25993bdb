"""Requires a number of kernels and of library calls: `fuse(f, require={"kernels": 1})`, `with require(externs=0)`.

Input: the report of each graph as it is compiled; output: nothing, or a `NotAsRequired` that lists the kernels and
library calls of the graph, with the reason, the cost and the line of each fusion that was refused.  A region that runs
eagerly never meets a requirement.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._dynamo.exc import ShortenTraceback

from fusion.inspect.report import Report
from fusion.lowering.errors import FusionError, by_place
from fusion.options import Requirements


class _AsItIs(ShortenTraceback):
    """An error that Dynamo passes on without one of its own around it."""

    def __init__(self, text: str) -> None:
        super().__init__(text, first_useful_frame=None)


class NotAsRequired(FusionError, _AsItIs):
    """A graph was compiled to more kernels or library calls than its program allows, or runs eagerly.

    Attributes:
        report: the report of the graph; None if nothing was compiled.
    """

    def __init__(self, message: str, *, hint: str = "", report: Report | None = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report


def _refuse_more(report: Report, most: Requirements) -> None:
    """Refuse a graph that has more than allowed.

    Raises:
        NotAsRequired: it has, or it runs eagerly.
    """
    if report.failure:
        raise NotAsRequired(f"{report.label} runs eagerly: {report.failure}", report=report)
    counts = {"kernels": len(report.kernels), "externs": len(report.externs)}
    limits = {"kernels": most.kernels, "externs": most.externs}
    over = {name: limit for name, limit in limits.items() if limit is not None and counts[name] > limit}
    if over:
        excess = " and ".join(f"{_counted(counts[name], name)} (allowed: {limit})" for name, limit in over.items())
        lines = [f"{report.label} has {excess}:", *_listed(report, with_kernels="kernels" in over)]
        raise NotAsRequired("\n  ".join(lines), hint=_HINT, report=report)


_HINT = "fusion.explain shows the whole report"


def _counted(number: int, nouns: str) -> str:
    """Return a number with its noun.

    >>> _counted(1, "kernels"), _counted(2, "kernels")
    ('1 kernel', '2 kernels')
    """
    return f"{number} {nouns.removesuffix('s')}" if number == 1 else f"{number} {nouns}"


def _listed(report: Report, *, with_kernels: bool) -> Iterator[str]:
    """Yield a line for each kernel, extern, tuning, note and refusal of a graph."""
    for kernel in report.kernels if with_kernels else ():
        yield f"kernel {kernel.name}: {'; '.join(by_place(kernel.origins))}"
    for extern in report.externs:
        yield f"extern {extern.name}: {extern.reason or 'no rule'}; {extern.origin}"
    yield from (line for tuning in report.tunings for line in str(tuning).splitlines())
    yield from report.notes
    for refusal in sorted(report.refusals, key=lambda refusal: -refusal.microseconds) if with_kernels else ():
        yield f"not fused {refusal}"


# Within a block -------------------------------------------------------------------------------------------------------


class _Blocks:
    """The blocks of `require` that are entered, in any thread: PyTorch runs backward in threads of its own."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    entered: ClassVar[list[_Block]] = []


@dataclass(slots=True, eq=False)
class _Block:
    requirements: Requirements
    graphs: int = 0


def check(report: Report, required: Requirements | None) -> None:
    """Check the report of a graph against its own requirements, and those of the blocks around its call.

    Raises:
        NotAsRequired: one is not met.
    """
    with _Blocks.lock:
        blocks = list(_Blocks.entered)
        for block in blocks:
            block.graphs += 1
    for each in (*([required] if required is not None else []), *(block.requirements for block in blocks)):
        _refuse_more(report, each)


@contextmanager
def require(*, kernels: int | None = None, externs: int | None = None) -> Iterator[None]:
    """Refuse, within a block, graphs with more kernels or library calls than allowed.

    Functions called within are compiled anew: Dynamo forgets, at the beginning, all compilations of this process.  The
    block is for tests; it covers all threads.

    Args:
        kernels: the most launches of generated kernels in each graph; forward and backward are graphs of their own.
        externs: the most calls in each graph that are left to PyTorch.

    Raises:
        NotAsRequired: in the call that compiles a graph with more, or runs a graph eagerly; at the end of the block,
            if nothing was compiled in it.
        TypeError: a number is none.
        ValueError: a number is negative, or neither is given.

    >>> import torch, fusion
    >>> softmax = fusion.fuse(lambda x: torch.softmax(x, -1))
    >>> with fusion.require(kernels=1, externs=0):
    ...     _ = softmax(torch.randn(4, 100))
    """
    block = _Block(Requirements.read({"kernels": kernels, "externs": externs}))
    torch._dynamo.reset()
    with _Blocks.lock:
        _Blocks.entered.append(block)
    try:
        yield
    finally:
        with _Blocks.lock:
            _Blocks.entered.remove(block)
    if not block.graphs:
        raise NotAsRequired("nothing was compiled", hint="call a fused program, with tensors, within the block")


__all__ = ["NotAsRequired", "check", "require"]
