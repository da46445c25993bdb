"""The interface of an observer of compiled graphs: it sees every step before it runs, and the report of each graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fusion.inspect.report import Report
from fusion.lowering.program import Extern
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall


class Watch(Protocol):
    """Observes the steps of compiled graphs; their results do not depend on it."""

    def __call__(self, step: KernelCall | Extern, run: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement for the function that runs a step: the launcher of a kernel, or the library's call."""

    def compiled(self, report: Report, schedule: Schedule) -> None:
        """Take note of a graph whose steps were passed before."""
