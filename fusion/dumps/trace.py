"""Traces one compilation: writes the subject of each stage after each pass to `FUSION_DUMP`.

Files are numbered in the order of the path, so that reading a directory from top to bottom explains the compilation:

    000_captured/  00_graph.py  01_inline_regions.py  …
    001_joint/     00_graph.py  01_lay_out_gradients.py  …
    002_forward/   00_graph.py  01_program.txt  05_inline_cheap_maps.txt  …  26_grow_clusters.txt  …
                   40_<kernel>.txt  40_<kernel>.py  40_<kernel>.ptx  …  90_module.py  98_passes.txt  99_report.txt

A pass that changed nothing has its number, but no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from torch import fx

from fusion.calls.fallback import warn_once
from fusion.codegen.target import Target
from fusion.dumps.folders import own_folder
from fusion.dumps.graph_files import GraphFile, input_ranges, module_text
from fusion.dumps.kernel_files import LaunchWork, kernel_text
from fusion.inspect.report import Report
from fusion.inspect.text import program_text
from fusion.lowering.errors import FusionError
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Program
from fusion.lowering.printer import format_kernel
from fusion.runner.passes import Observer, PassLog, PassTime
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall

_numbers = itertools.count()  # compilations of one process get directories in their order

FIRST_KERNEL = 40
"""The number of the first kernel in the names of dumps."""

_GRAPH = "00_graph.py"


class Trace:
    """Writes the stages of one compilation below `root`, or nothing if it is None; `log` has the time of each pass.

    A dump never changes how the program runs: the first file that cannot be written ends it, with a warning.
    An `observer` sees the subjects themselves.
    """

    def __init__(
        self,
        root: Path | None,
        label: str,
        *,
        times: list[PassTime] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.folder: Path | None = None
        self._root = root
        self._before: tuple[tuple[str, str], ...] = ()
        self._graph: GraphFile | None = None
        self._kernels: dict[Kernel, str] = {}  # the names of their files
        self._suffix = ""  # of the target's sources
        if root is not None:
            with self._writing():
                self.folder = own_folder(root) / f"{next(_numbers):03d}_{label}"
                self.folder.mkdir(parents=True, exist_ok=True)
        self.log = PassLog(None if root is None else self, [] if times is None else times, observer)

    def within(self, name: str) -> Trace:
        """Return the trace of a part, in a subdirectory."""
        inner = Trace(None, name, times=self.log.times, observer=self.log.observer)
        if self.folder is not None:
            inner.folder, inner._root = self.folder / name, self._root
            inner._suffix = self._suffix
            inner._kernels = {kernel: f"../{file}" for kernel, file in self._kernels.items()}
            inner.log.dumps = inner
            with inner._writing():
                inner.folder.mkdir(exist_ok=True)
        return inner

    def graph(self, graph: fx.GraphModule) -> None:
        """Write the captured graph."""
        if self.folder is not None:
            with self._writing():
                self._graph = GraphFile.of(graph)
                text = self._graph.text({})
                self._before = (("py", text),)
                self._write(_GRAPH, text)

    def program(self, number: int, name: str, program: Program) -> None:
        """Write a program."""
        if self.folder is not None:
            self.passed(number, name, program_text(program))

    def passed(self, number: int, name: str, texts: Iterator[tuple[str, str]]) -> bool:
        """Write the texts of the subject after a pass, if they differ from those before it; return whether they do."""
        written: tuple[tuple[str, str], ...] = ()
        with self._writing():
            written = tuple(texts)
        if written == self._before:
            return False
        self._before = written
        for suffix, text in written:
            self._write(f"{number:02d}_{name}.{suffix}", text)
        return True

    def kernels(
        self,
        calls: Iterable[KernelCall],
        sources: Mapping[Kernel, str],
        target: Target,
        edited: Mapping[Kernel, str] = MappingProxyType({}),
    ) -> None:
        """Write each kernel: the block program, a file that runs its source, and the artefacts of the target's tools.

        Args:
            calls: the launches, of which a kernel may have several.
            sources: the generated source of each kernel.
            edited: the sources that replace some of them.
        """
        if self.folder is None:
            return
        self._suffix = target.suffix
        first = {call.kernel: call for call in reversed([*calls])}
        for number, (kernel, generated) in enumerate(sources.items(), FIRST_KERNEL):
            source = edited.get(kernel, generated)
            stem, call = f"{number:02d}_{kernel.name}", first[kernel]
            self._kernels[kernel] = f"{stem}.py"
            self._write(f"{stem}.txt", format_kernel(kernel))
            figures = LaunchWork(call.bytes_read + call.bytes_written, call.flops)
            with self._writing():
                self._write(f"{stem}.py", kernel_text(kernel, source, generated, target, figures))
            self._artefacts(stem, kernel, source, target)

    def _artefacts(self, stem: str, kernel: Kernel, source: str, target: Target) -> None:
        """Write the output of the target's tools for a source, or their error: the program may run all the same."""
        try:
            for suffix, content in target.stages(kernel, source):
                self._write(f"{stem}.{suffix}", content)
        except FusionError as error:
            self._write(f"{stem}.failed.txt", str(error))

    def module(self, module: fx.GraphModule, schedule: Schedule) -> None:
        """Write the spliced modules of a schedule and its chunks, and the graph again, with the facts known by now."""
        if self.folder is None:
            return
        with self._writing():
            if self._graph is not None:
                self._write(_GRAPH, self._graph.text(input_ranges(schedule)))
            self._module(module, "" if self._graph is None else _GRAPH)

    def _module(self, module: fx.GraphModule, graph: str) -> None:
        self._write("90_module.py", module_text(module, self._kernels, graph, self._suffix))
        for name, body in module.named_children():
            if isinstance(body, fx.GraphModule):
                self.within(name)._module(body, "")

    def report(self, report: Report) -> None:
        """Write the report, and the passes with their times."""
        if self.folder is not None:
            self._write("98_passes.txt", passes_text(report.passes))
            self._write("99_report.txt", str(report))

    def _write(self, name: str, content: str | bytes) -> None:
        if self.folder is None:
            return
        if isinstance(content, str):  # it may name files that are not UTF-8
            content = content.rstrip("\n").encode("utf-8", "backslashreplace") + b"\n"
        with self._writing():
            (self.folder / name).write_bytes(content)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Warn once of a failure instead of raising it; write no more to a directory that refuses."""
        try:
            yield
        except OSError as error:
            self.folder = None
            hint = "set FUSION_DUMP or options['dump'] to a directory that can be written"
            warn_once(f"no more is dumped: {self._root} cannot be written: {error.strerror}; {hint}")
        except Exception as defect:  # an internal error
            warn_once(f"the dump in {self._root} lacks a file; please report it: {type(defect).__name__}: {defect}")


def passes_text(passes: Sequence[PassTime]) -> str:
    """Print the passes in the order in which they ended, with their milliseconds and whether they changed anything.

    >>> print(passes_text([PassTime("program", "inline_cheap_maps", 0.0123, changed=True)]))
      12.3 ms  program/inline_cheap_maps
      12.3 ms  in all
    """
    lines = [
        f"{each.seconds * 1e3:6.1f} ms  {each.stage}/{each.name}{'' if each.changed is not False else '  (unchanged)'}"
        for each in passes
    ]
    return "\n".join([*lines, f"{sum(each.seconds for each in passes) * 1e3:6.1f} ms  in all"])
