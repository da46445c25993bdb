"""Collects the reports of a backend: one for each graph that it compiled or left to eager, in order, from any thread.

Information on a region before its graphs are compiled (attention choices, the reason of its end, the time of the passes
before autograd) is added to the report of its first graph.  The reports of each region are also kept by themselves: a
program has the reports of the regions that it runs (`fusion/calls/callers.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fusion.inspect.breaks import Break
from fusion.inspect.log import log_report
from fusion.inspect.report import Report
from fusion.runner.passes import PassTime

MOST_REPORTS = 1 << 10
"""The number of reports that a backend, or a program, keeps, with the sources of kernels; the oldest are dropped."""


@dataclass(slots=True, eq=False)
class RegionReports:
    """The reports of the graphs of one region, and notes to be added to the first of them.

    Attributes:
        graph_break: why the region ends before the program does.
        notes: for its first report, until there is one.
        times: of the passes before autograd, for its first report.
        first: the report of its first graph, once there is one.
        all: its reports, with those of its parts.
    """

    graph_break: Break | None = None
    notes: tuple[str, ...] = ()
    times: list[PassTime] = field(default_factory=list)
    first: Report | None = None
    all: list[Report] = field(default_factory=list)


class Reports:
    """Collects reports; thread-safe.  Each thread compiles one region at a time."""

    def __init__(self) -> None:
        self.all: list[Report] = []
        self._lock = threading.Lock()
        self._compiling = threading.local()

    @property
    def current(self) -> RegionReports | None:
        """The region that this thread compiles."""
        return getattr(self._compiling, "region", None)

    @contextmanager
    def region(self, graph_break: Break | None, within: RegionReports | None = None) -> Iterator[RegionReports]:
        """Collect the reports of a region; `within`: the region that it is a part of."""
        region = RegionReports(graph_break) if within is None else RegionReports(graph_break, all=within.all)
        try:
            with self.again(region):
                yield region
        finally:
            self._finish(region)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Report graphs within (bodies of control flow) without the region's information."""
        outer = self.current
        with self.again(None if outer is None else RegionReports(all=outer.all)):
            yield

    @contextmanager
    def again(self, region: RegionReports | None) -> Iterator[None]:
        """Add the reports of a block to a region, which may have been compiled before."""
        outer, self._compiling.region = self.current, region
        try:
            yield
        finally:
            self._compiling.region = outer

    def add(self, report: Report) -> Report:
        """Add the report of a graph; return it with the facts of its region."""
        region = self.current
        with self._lock:
            if region is not None and region.first is None:
                notes = (*region.notes, *report.notes)
                region.first = report = replace(report, notes=notes, graph_break=region.graph_break)
            for reports in self._lists(region):
                reports.append(report)
                del reports[:-MOST_REPORTS]
        log_report(report)
        return report

    def note(self, note: str) -> None:
        """Add a note to the first report of the region that this thread compiles, else to the last report."""
        region = self.current
        with self._lock:
            if region is not None and region.first is None:
                region.notes = (*region.notes, note)
                return
            if self.all:
                last = self.all[-1]
                changed = self._replace(region, last, replace(last, notes=(*last.notes, note)))
                if region is not None and region.first is last:
                    region.first = changed

    def _finish(self, region: RegionReports) -> None:
        """Add the times of a region's passes to its first report."""
        with self._lock:
            if region.first is not None:
                timed = replace(region.first, passes=(*region.times, *region.first.passes))
                region.first = self._replace(region, region.first, timed)

    def _lists(self, region: RegionReports | None) -> list[list[Report]]:
        return [self.all] if region is None else [self.all, region.all]

    def _replace(self, region: RegionReports | None, old: Report, new: Report) -> Report:
        for reports in self._lists(region):
            for number, report in enumerate(reports):
                if report is old:
                    reports[number] = new
        return new
