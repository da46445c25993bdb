"""Collects the reports of a backend: one for each graph that it compiled or left to eager, in order, from any thread.

Information on a region before its graphs are compiled (attention choices, the reason of its end, the time of the passes
before autograd) is added to the report of its first graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fusion.inspect.breaks import Break
from fusion.inspect.log import log_report
from fusion.inspect.report import Report
from fusion.passes import PassTime

MOST_REPORTS = 1 << 10
"""The number of reports that a backend keeps, with the sources of kernels; the oldest are dropped."""


@dataclass(slots=True)
class _Region:
    """A region under compilation; `first` is the report of its first graph, once there is one."""

    graph_break: Break | None = None
    notes: tuple[str, ...] = ()
    times: list[PassTime] = field(default_factory=list)
    first: Report | None = None


class Reports:
    """Collects reports; thread-safe.  Each thread compiles one region at a time."""

    def __init__(self) -> None:
        self.all: list[Report] = []
        self._lock = threading.Lock()
        self._compiling = threading.local()

    @contextmanager
    def region(self, graph_break: Break | None) -> Iterator[list[PassTime]]:
        """Add notes from within to the first report; yield a list for the times of the region's passes."""
        outer, region = self._region(), _Region(graph_break)
        self._compiling.region = region
        try:
            yield region.times
        finally:
            self._compiling.region = outer
            self._finish(region)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Report graphs within (bodies of control flow) without the region's information."""
        outer = self._region()
        self._compiling.region = None
        try:
            yield
        finally:
            self._compiling.region = outer

    def add(self, report: Report) -> Report:
        """Add the report of a graph; return it with the facts of its region."""
        region = self._region()
        with self._lock:
            if region is not None and region.first is None:
                notes = (*region.notes, *report.notes)
                region.first = report = replace(report, notes=notes, graph_break=region.graph_break)
            self.all.append(report)
            del self.all[:-MOST_REPORTS]
        log_report(report)
        return report

    def note(self, note: str) -> None:
        """Add a note to the first report of the region that this thread compiles, else to the last report."""
        region = self._region()
        with self._lock:
            if region is not None and region.first is None:
                region.notes = (*region.notes, note)
                return
            if self.all:
                last = self.all[-1]
                changed = self._replace(last, replace(last, notes=(*last.notes, note)))
                if region is not None and region.first is last:
                    region.first = changed

    def _region(self) -> _Region | None:
        return getattr(self._compiling, "region", None)

    def _finish(self, region: _Region) -> None:
        """Add the times of a region's passes to its first report."""
        with self._lock:
            if region.first is not None:
                self._replace(region.first, replace(region.first, passes=(*region.times, *region.first.passes)))

    def _replace(self, old: Report, new: Report) -> Report:
        for number, report in enumerate(self.all):
            if report is old:
                self.all[number] = new
        return new
