"""Explains a program by the reports of all of its graphs, as text, as JSON and as a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fusion.codegen.target import Target
from fusion.inspect.breaks import Break
from fusion.inspect.certificate import Certificate
from fusion.inspect.document import Document, Finding, artefacts_of, document_of
from fusion.inspect.page import frame_of, page_of
from fusion.inspect.report import ExternReport, KernelReport, Report, Traffic, farthest_first
from fusion.schedule import Refusal


@dataclass(frozen=True, slots=True)
class Explanation:
    """Holds the reports of all graphs of a program, and their sums.  `print` shows it as a list.

    Attributes:
        graphs: the report of each graph, in the order of compilation.
        other_breaks: graph breaks that do not end a graph, as far as Dynamo remembers: a function that runs entirely in
            eager, a break before the first operation.
        certificate: the checks of the compiled program (`explain(..., verify=True)`), else None.
        finding: the outcome of a command beyond these reports, else None.
        called: whether the program is known to have run; if nothing was compiled, the text says so.
        target: builds the artefacts of kernels that were generated ahead of time; None: the target of this machine.
    """

    graphs: tuple[Report, ...]
    other_breaks: tuple[Break, ...] = ()
    certificate: Certificate | None = None
    finding: Finding | None = None
    called: bool = field(default=True, repr=False, compare=False)
    target: Target | None = field(default=None, repr=False, compare=False)

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """The launches of all graphs, in their order."""
        return tuple(kernel for graph in self.graphs for kernel in graph.kernels)

    @property
    def far_off(self) -> tuple[KernelReport, ...]:
        """The kernels whose measured time is far from the predicted one, the farthest first."""
        return farthest_first(self.kernels)

    @property
    def externs(self) -> tuple[ExternReport, ...]:
        """The calls that were left to PyTorch, with their reasons."""
        return tuple(extern for graph in self.graphs for extern in graph.externs)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The data edges that were not fused, with reason, bytes and predicted microseconds."""
        return tuple(refusal for graph in self.graphs for refusal in graph.refusals)

    @property
    def graph_breaks(self) -> tuple[Break, ...]:
        """The places at which the program leaves a graph and goes on in Python."""
        return (*(graph.graph_break for graph in self.graphs if graph.graph_break is not None), *self.other_breaks)

    @property
    def traffic_before(self) -> Traffic:
        """The bytes that all operations would move, each by itself."""
        return sum((graph.traffic_before for graph in self.graphs), Traffic(0, 0))

    @property
    def traffic_after(self) -> Traffic:
        """The bytes that all kernels and calls move."""
        return sum((graph.traffic_after for graph in self.graphs), Traffic(0, 0))

    def __str__(self) -> str:
        reason = "no tensor operations were captured" if self.called else "it was not called, or captured no operations"
        graphs = self.graphs or (f"nothing was compiled: {reason}",)
        checked = () if self.certificate is None else (self.certificate,)
        return "\n".join(map(str, (*graphs, *self.other_breaks, *checked)))

    def json(self, *, artefacts: bool = False) -> Document:
        """Return the reports as data that `json.dumps` takes, in the structure of `Document`.

        Args:
            artefacts: also run the target's tools on each kernel, and include their output.
        """
        texts = artefacts_of(self.kernels, self.target) if artefacts else {}
        return document_of(self.graphs, self.other_breaks, texts, self.certificate, self.finding)

    def html(self, path: str | Path, *, artefacts: bool = True) -> Path:
        """Write the reports as one page for a browser, which loads nothing else, and return its path.

        Args:
            path: the file, which is replaced.
            artefacts: also run the target's tools on each kernel, and show their output.

        Raises:
            OSError: the file cannot be written.
        """
        file = Path(path)
        file.write_text(page_of(self.json(artefacts=artefacts)), encoding="utf-8")
        return file

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks; without artefacts."""
        return frame_of(page_of(self.json()))
