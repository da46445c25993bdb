"""Defines the interface of observers, which see each step of a compiled graph before it runs, and each report."""

from __future__ import annotations

from collections.abc import Callable

from fusion.inspect.report import Report
from fusion.lowering.ir.program import Extern
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall


class Watch:
    """Observes the steps of compiled graphs, and the passes over them; their results do not depend on it."""

    def __call__(self, step: KernelCall | Extern, run: Callable[..., object]) -> Callable[..., object]:
        """Return a replacement for the function that runs a step: the launcher of a kernel, or the library's call."""
        return run

    def compiled(self, report: Report, schedule: Schedule) -> None:
        """Record a compiled graph; `__call__` has received its steps before."""

    def passed(self, stage: str, name: str, subject: object, context: object) -> None:
        """Record the subject of a stage after a pass (`passes.Observer`)."""
