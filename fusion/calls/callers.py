"""Determines the compiled program for which a region runs: equal programs share their compiled code.

Dynamo keeps compiled code by the code of the program, so that the twelve blocks of a model are compiled once; neither
at compilation nor at a call does it tell a backend which of them is called.  The frames of the call do: PyTorch makes
one callback for each `torch.compile`, and sets it aside while a region runs.

Input: the run of a region, and its reports; output: the same run, which adds the region to the `ProgramRegions` of its
caller.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Lock
from types import CodeType, FrameType
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import _TorchDynamoContext

from fusion.calls import reports
from fusion.calls.reports import RegionReports
from fusion.inspect.report import Report

Run: TypeAlias = Callable[..., object]

_FILE = eval_frame.__file__
_DEPTH = 32
"""The number of frames between a region and the call of its program, at most: PyTorch's own."""


class ProgramRegions:
    """Holds the regions that one compiled program has run, or begun to compile, in order.

    Attributes:
        since: when the program was compiled first, or asked about.
    """

    def __init__(self) -> None:
        self.since = time.time()
        self._regions: list[RegionReports] = []

    def add(self, region: RegionReports) -> None:
        """Add a region, once."""
        if region not in self._regions:
            self._regions.append(region)
            del self._regions[: -reports.MOST_REPORTS]

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of the graphs of these regions, in order."""
        return tuple(report for region in self._regions for report in region.all)[-reports.MOST_REPORTS :]


_CALLS: WeakKeyDictionary[object, ProgramRegions] = WeakKeyDictionary()
"""The callback of a compiled program → the calls of that program."""

_ADDING = Lock()


def calls_of(compiled: object) -> ProgramRegions | None:
    """Return the calls of a program that `torch.compile`, `Module.compile` or `fuse` returned; None for another."""
    context = context_of(compiled)
    return None if context is None else _calls_for(context.callback)


def context_of(compiled: object) -> _TorchDynamoContext | None:
    """Return Dynamo's context of a program that `torch.compile`, `Module.compile` or `fuse` returned."""
    if isinstance(context := getattr(compiled, "dynamo_ctx", None), _TorchDynamoContext):
        return context
    call = compiled._compiled_call_impl if isinstance(compiled, torch.nn.Module) else compiled
    while call is not None:
        for cell in getattr(call, "__closure__", None) or ():
            if isinstance(cell.cell_contents, _TorchDynamoContext):
                return cell.cell_contents
        call = getattr(call, "__wrapped__", None)  # `fuse` returns a function around PyTorch's
    return None


def begun(region: RegionReports) -> None:
    """Add a region that is being compiled to the calls of the program that is called."""
    if (callback := _callback(sys._getframe(1), sys.maxsize)) is not None:
        _note(region, callback)


def noted_in(region: RegionReports, run: Run) -> Run:
    """Return the run of a region, which adds it to the calls of each program that calls it."""
    last: object = None

    def call(*args: object) -> object:
        nonlocal last
        frame = sys._getframe(1)
        before = frame.f_locals.get("prior")  # of PyTorch's frame around compiled code
        if before is None or before is not last:
            callback = _callback(frame, _DEPTH)
            if callback is not None:
                _note(region, callback)
            last = before if before is callback else None
        return run(*args)

    return call


def _note(region: RegionReports, callback: object) -> None:
    calls = _calls_for(callback)
    with _ADDING:
        calls.add(region)


def _calls_for(callback: object) -> ProgramRegions:
    with _ADDING:
        return _CALLS.setdefault(callback, ProgramRegions())


def _callback(frame: FrameType | None, depth: int) -> object | None:
    """Return the callback of the innermost compiled program that is called, in the next frames of the stack."""
    while frame is not None and depth:
        if _is_call(frame.f_code):
            callback: object = frame.f_locals["callback"]
            return callback
        frame, depth = frame.f_back, depth - 1
    return None


def _is_call(code: CodeType) -> bool:
    """Return whether code belongs to PyTorch's function that calls a compiled program."""
    return code.co_filename == _FILE and "callback" in code.co_freevars


__all__ = ["ProgramRegions", "begun", "calls_of", "context_of", "noted_in"]
