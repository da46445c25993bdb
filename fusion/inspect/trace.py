"""The trace of one compilation: what each stage made, written to `FUSION_DUMP` as it is made.

Files are numbered in the order of the path, so that reading a directory from top to bottom explains what happened:

    00_graph.py  01_program.txt  04_inlined.txt  …  14_clusters.txt  14_clusters.dot  20_<kernel>.txt  20_<kernel>.py|c
    20_<kernel>.ptx …  90_module.py  99_report.txt

A pass that changed nothing has its number, but no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import fx

from fusion.codegen.target import Target
from fusion.inspect.report import Report
from fusion.lowering.errors import FusionError
from fusion.lowering.kernel import Kernel
from fusion.lowering.printer import format_kernel, format_program
from fusion.lowering.program import Program, reads, writes
from fusion.schedule import Clustering

_numbers = itertools.count()  # graphs of one process get directories in the order of their compilation


class Trace:
    """Writes the stages of one compilation below `root`, or nothing if it is None."""

    def __init__(self, root: Path | None, label: str, target: Target) -> None:
        self.target = target
        self.folder: Path | None = None
        self.stage = itertools.count(1)
        self.program_before: Program | None = None
        if root is not None:
            self.folder = root / f"{next(_numbers):03d}_{label}"
            with _written(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    def within(self, name: str) -> Trace:
        """The trace of a part, in a directory of its own below this one."""
        inner = Trace(None, name, self.target)
        if self.folder is not None:
            inner.folder = self.folder / name
            with _written(inner.folder):
                inner.folder.mkdir(exist_ok=True)
        return inner

    def graph(self, graph: fx.GraphModule) -> None:
        """Write the captured graph."""
        if self.folder is not None:
            self._write("00_graph.py", graph.print_readable(print_output=False))

    def program(self, name: str, program: Program) -> Program:
        """Write the program after the pass `name`, if that has changed it; returns it."""
        stage = next(self.stage)
        if self.folder is not None and program is not self.program_before:
            self._write(f"{stage:02d}_{name}.txt", format_program(program))
        self.program_before = program
        return program

    def clustering(self, program: Program, clustering: Clustering) -> Clustering:
        """Write the clusters, as text and as a picture; returns them."""
        stage = next(self.stage)
        if self.folder is not None:
            self._write(f"{stage:02d}_clusters.txt", _clusters_text(program, clustering))
            self._write(f"{stage:02d}_clusters.dot", _clusters_dot(program, clustering))
        return clustering

    def kernels(self, sources: Mapping[Kernel, str]) -> None:
        """Write each kernel: the block program, its source, and what the target's tools make of that."""
        if self.folder is None:
            return
        for number, (kernel, source) in enumerate(sources.items()):
            stem = f"{20 + number:02d}_{kernel.name}"
            self._write(f"{stem}.txt", format_kernel(kernel))
            self._write(f"{stem}.{SUFFIXES.get(self.target.name, 'txt')}", source)
            for suffix, content in self.target.stages(kernel, source):
                self._write(f"{stem}.{suffix}", content)

    def module(self, module: fx.GraphModule) -> fx.GraphModule:
        """Write the code of the spliced module; returns it."""
        if self.folder is not None:
            self._write("90_module.py", module.code.lstrip("\n"))
        return module

    def report(self, report: Report) -> None:
        """Write the report."""
        if self.folder is not None:
            self._write("99_report.txt", str(report))

    def _write(self, name: str, content: str | bytes) -> None:
        assert self.folder is not None
        data = content if isinstance(content, bytes) else content.rstrip("\n").encode() + b"\n"
        with _written(self.folder / name):
            (self.folder / name).write_bytes(data)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "FUSION_DUMP or options['dump'] says where dumps go"
        raise FusionError(f"the dump {path} cannot be written: {error.strerror}", hint=hint) from error


SUFFIXES = {"triton": "py", "c": "c"}
"""Target → file suffix of its source."""


def _clusters_text(program: Program, clustering: Clustering) -> str:
    lines: list[str] = []
    for number, cluster in enumerate(clustering.clusters):
        kind = "extern" if cluster.extern else "cluster"
        lines.append(f"{kind} {number}: {', '.join(map(str, cluster.space.axes))}")
        for member in cluster.members:
            for name in writes(program.nodes[member]):
                lines.append(f"    {name}  # {program.origins.get(name, '')}")
    lines.append("")
    lines.extend(f"not fused: {refusal}" for refusal in clustering.refusals)
    return "\n".join(lines)


def _clusters_dot(program: Program, clustering: Clustering) -> str:
    lines = ["digraph clusters {", "  rankdir=TB; node [shape=box, fontname=monospace];"]
    for number, cluster in enumerate(clustering.clusters):
        lines.append(f'  subgraph cluster_{number} {{ label="{number}";')
        for member in cluster.members:
            lines.extend(f'    "{name}";' for name in writes(program.nodes[member]))
        lines.append("  }")
    for node in program.nodes:
        lines.extend(f'  "{source}" -> "{out}";' for out in writes(node) for source in reads(node))
    lines.append("}")
    return "\n".join(lines)
