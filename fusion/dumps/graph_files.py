"""Writes the files of a graph and of its compiled module, which run.

Input: an fx graph, or the module that is spliced of it, with its inputs; output: Python text.  Run, a graph computes
with PyTorch's own operations, and the module of the same folder is compared with it (`graph_running.py`).  A graph that
a file cannot hold, because it calls compiled functions or objects of the program, says so instead of running.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.graph import CodeGen

from fusion.dumps.fx_text import NoText, attributes_of, launches_of, names_of
from fusion.dumps.kernel_files import INTERPRETED, sizes_of
from fusion.dumps.ranges import Range, ranges_of
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Extern
from fusion.lowering.ir.sizes import hint_of
from fusion.lowering.random.seeded import draws, seeded
from fusion.runtime.names import identifier
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall

_CLASS = re.compile(r"\bclass (\S+)(?=\(torch\.nn\.Module\):)")


@dataclass(frozen=True, slots=True)
class GraphFile:
    """The file of a graph, without the ranges of its inputs, which are known once it is compiled.

    Attributes:
        code: the classes of the graph, as fx prints them.
        names: lines that define the names in the code.
        attributes: lines that set the tensors of `module`.
        calls: for each input, the call that draws it, without a range, and its name.
        unchecked: whether PyTorch's operations may use positions without a check, so that those whose range is not
            known are all 0: operations of backward take them for forward's.
        random: the positions of results that depend on random numbers, which a compiled module draws otherwise.
        missing: the parts that a file cannot hold; empty if the graph runs.
    """

    code: str
    names: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    unchecked: bool = False
    random: tuple[int, ...] = ()
    missing: str = ""

    @classmethod
    def of(cls, graph: fx.GraphModule) -> GraphFile:
        """Describe a graph, as it is now."""
        graph = _flat(graph)
        code = _CLASS.sub(_of_identifier, graph.print_readable(print_output=False).strip("\n"))
        try:
            names, attributes = tuple(names_of(graph, code)), tuple(attributes_of(graph))
            calls = tuple((_drawn(node), node.name) for node in graph.graph.find_nodes(op="placeholder"))
        except NoText as missing:
            return cls(code, missing=str(missing))
        unchecked = any(isinstance(n.target, OpOverload) and "backward" in str(n.target) for n in graph.graph.nodes)
        return cls(code, names, attributes, calls, unchecked, _random_results(graph))

    def text(self, ranges: Mapping[int, Range]) -> str:
        """Return the text of the file; `ranges` has the ranges of integer inputs, by position."""
        if self.missing:
            return _cannot_run(self.missing, self.code)
        lines = [
            "# Run this file: it computes the graph with PyTorch's operations, and measures it.",
            *("import torch", "", "from fusion import dumps"),
            *(line for line in self.names if line.startswith(("from ", "import "))),
            "",
            *(line for line in self.names if not line.startswith(("from ", "import "))),
            *("", self.code, "", "", *self._inputs(ranges), "", ""),
            f"module = dumps.module_of({_class_of(self.code)})",
            *self.attributes,
            f"RANDOM = {self.random}  # results that depend on random numbers",
            *("", 'if __name__ == "__main__":', "    dumps.run_graph(module, inputs)"),
        ]
        return "\n".join(lines)

    def _inputs(self, ranges: Mapping[int, Range]) -> Iterator[str]:
        yield "def inputs(draw):"
        yield '    """Make the inputs: values as their dtypes, and the checks of kernels on them, allow."""'
        yield "    return ["
        for position, (call, name) in enumerate(self.calls):
            known = ranges.get(position, (0, 0) if self.unchecked else None)
            if known is not None and call.startswith("draw.integers("):
                call = f"{call.removesuffix(')')}, low={known[0]}, high={known[1]})"
            yield f"        {call},  # {name}"
        yield "    ]"


def graph_text(graph: fx.GraphModule, of: str = "") -> Iterator[tuple[str, str]]:
    """Print the subject of a pass over an fx graph, as (file suffix, content); `of` begins the suffix."""
    yield f"{of}py", GraphFile.of(graph).text({})


def module_text(module: fx.GraphModule, kernels: Mapping[Kernel, str], graph: str, suffix: str) -> str:
    """Return the text of the file of a compiled module.

    Args:
        kernels: the path of each kernel's file, from the folder of the module.
        graph: the name of the file of the graph in the same folder; empty for a part of another module.
        suffix: the suffix of the target's sources.
    """
    code = module.code.strip("\n")
    try:
        names, attributes = names_of(module, code, launches_of(module, kernels)), [*attributes_of(module, nested=False)]
    except NoText as missing:
        return _cannot_run(str(missing), code)
    run = (
        f"dumps.run_module(__file__, module, {graph!r})" if graph else 'print("run ../90_module.py, which calls this")'
    )
    lines = [
        "# Run this file: it compares the compiled module with the graph of the same folder, and measures both.",
        *(INTERPRETED if suffix == "py" else ("import torch", "")),
        "from fusion import dumps",
        *(line for line in names if line.startswith(("from ", "import "))),
        "",
        *(line for line in names if not line.startswith(("from ", "import "))),
        "",
        "",
        "class Compiled(torch.nn.Module):",
        *(f"    {line}".rstrip() for line in code.splitlines()),
        "",
        "",
        *("module = dumps.module_of(Compiled)", *attributes),
        *("", 'if __name__ == "__main__":', f"    {run}"),
    ]
    return "\n".join(lines)


def input_ranges(schedule: Schedule) -> dict[int, Range]:
    """Return the ranges of inputs that kernels check, by position."""
    program, ranges = schedule.program, dict[str, Range]()
    views = {step.outs[0]: step.reads[0] for step in schedule.steps if isinstance(step, Extern) and step.is_view}
    for call in schedule.steps:
        if not isinstance(call, KernelCall):
            continue
        of_params = ranges_of(call.kernel, sizes_of(call.kernel))
        for param, buffer in zip(call.kernel.params, call.buffers, strict=True):
            while buffer in views:
                buffer = views[buffer]
            if param.name in of_params:
                low, high = of_params[param.name]
                known = ranges.get(buffer, (low, high))
                ranges[buffer] = max(low, known[0]), min(high, known[1])
    return {k: ranges[name] for k, name in enumerate(program.inputs) if isinstance(name, str) and name in ranges}


def _of_identifier(declared: re.Match[str]) -> str:
    """Return the declaration of a class under a name that Python accepts: fx may call one `<lambda>`."""
    return f"class {identifier(declared[1])}"


def _class_of(code: str) -> str:
    """Return the name of the first class in a text."""
    declaration = _CLASS.search(code)
    assert declaration, "fx prints a class"
    return declaration[1]


def _flat(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph whose code takes its inputs one by one, and returns a flat tuple."""
    if type(graph.graph._codegen) is CodeGen:
        return graph
    plain = fx.Graph()
    plain.output(plain.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, plain, type(graph).__name__)


def _random_results(graph: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of results that depend on random numbers."""
    random: set[fx.Node] = set()
    for node in graph.graph.nodes:
        is_drawn = node.target is seeded or draws(node.target, node.args, node.kwargs)
        if is_drawn or not random.isdisjoint(node.all_input_nodes):
            random.add(node)
    (results,) = graph.graph.output_node().args
    flat = results if isinstance(results, (list, tuple)) else (results,)
    return tuple(k for k, result in enumerate(flat) if result in random)


def _cannot_run(missing: str, code: str) -> str:
    """Return the text of a file that only shows code, and names the parts that it lacks to run."""
    reason = f"This file does not run by itself: it needs {missing}."
    return "\n".join(
        [f"# {reason}", "import torch", "", code, "", 'if __name__ == "__main__":', f"    print({reason!r})"]
    )


def _drawn(node: fx.Node) -> str:
    """Return a call that draws an input like the traced one.

    Raises:
        NoText: it is no plain tensor and no number.
    """
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return str(hint_of(value))
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_complex()
    if not plain or value.is_quantized:
        raise NoText(f"the input {node.name}, a {type(value).__name__}")
    layout = f"{tuple(map(hint_of, value.shape))}, {tuple(map(hint_of, value.stride()))}"
    host = ", host=True" if value.device.type == "cpu" else ""
    if value.dtype is torch.bool:
        return f"draw.booleans({layout}{host})"
    if not value.dtype.is_floating_point:
        return f"draw.integers({layout}, {value.dtype}{host})"
    scaled = f", scale={_scale(tuple(map(hint_of, value.shape))):.3g}" if value.ndim > 1 else ""
    return f"draw.normal({layout}, {value.dtype}{host}{scaled})"


def _scale(shape: tuple[int, ...]) -> float:
    """Return the deviation with which a product with a tensor of weights keeps the magnitude of its operand.

    Else a deep network overflows.  Which inputs are weights is not known: all are drawn so.
    """
    return 1 / math.sqrt(max(1, math.prod(shape[1:])))


__all__ = ["GraphFile", "graph_text", "input_ranges", "module_text"]
