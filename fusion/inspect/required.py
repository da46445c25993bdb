"""Requires a number of kernels and of library calls: `fuse(f, require={"kernels": 1})`, `with require(externs=0)`.

Input: the report of each graph as it is compiled; output: nothing, or a `NotAsRequired` that lists the kernels and
library calls of the graph, with the reason, the cost and the line of each fusion that was refused.  A region that runs
eagerly never meets a requirement.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch._dynamo.exc import ShortenTraceback

from fusion.inspect.report import Report
from fusion.lowering.errors import FusionError, by_place


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


@dataclass(frozen=True, slots=True)
class Requirements:
    """The most that each compiled graph may have: forward and backward are one each.

    Attributes:
        kernels: launches of generated kernels; None for any number.
        externs: calls that are left to PyTorch; None for any number.
    """

    kernels: int | None = None
    externs: int | None = None

    @classmethod
    def read(cls, given: object) -> Requirements:
        """Read requirements from a mapping.

        Raises:
            TypeError: it is no mapping, or a value is no whole number.
            ValueError: a name is unknown, a number is negative, or nothing is required.

        >>> Requirements.read({"kernels": 1})
        Requirements(kernels=1, externs=None)
        """
        if isinstance(given, Requirements):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"require must be a mapping, got {type(given).__name__}")
        known = [each.name for each in fields(cls)]
        for name, number in given.items():
            if name not in known:
                raise ValueError(f"unknown requirement {name!r}; known: {', '.join(known)}")
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise TypeError(f"require: {name} must be a number, got {type(number).__name__}")
            if number is not None and number < 0:
                raise ValueError(f"require: {name} must not be negative, got {number}")
        read = cls(**given)
        if read == cls():
            raise ValueError(f"nothing is required; known: {', '.join(known)}")
        return read

    def check(self, report: Report) -> None:
        """Refuse a graph that has more.

        Raises:
            NotAsRequired: it has, or it runs eagerly.
        """
        if report.failure:
            raise NotAsRequired(f"{report.label} runs eagerly: {report.failure}", report=report)
        counts = {"kernels": len(report.kernels), "externs": len(report.externs)}
        limits = {"kernels": self.kernels, "externs": self.externs}
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
        each.check(report)


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


__all__ = ["NotAsRequired", "Requirements", "check", "require"]
