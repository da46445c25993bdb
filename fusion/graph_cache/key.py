"""Key: all that decides what a graph is compiled to, as one text.

Input: an ATen graph with its fake tensors, what was asked for and the target; output: the text that an earlier
compilation of the same graph is found by.  It names everything that any pass may look at: operations with their
arguments, sizes, strides, dtypes, devices, which tensors share memory, the user's lines, guards on sizes, settings of
PyTorch, the machine, versions, and the sources of this compiler.  What cannot be told in full has no key.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion.codegen.cache import digest
from fusion.codegen.target import Target
from fusion.graph_cache.form import Unwritten, write
from fusion.joint.saved import SPARE
from fusion.lowering.builder import origin_of
from fusion.lowering.rules.conversion import ONLY_STORED
from fusion.options import Options

MARKS = ("original_aten", "recompute", ONLY_STORED, SPARE)
"""What else a pass may read of a node than its value and where it comes from."""

_WRITTEN = (".py", ".c", ".h")
_SETTINGS = ("FUSION_", "TRITON_", "CC", "CUDA_HOME", "PTXAS")
_NOT_DECIDING = ("FUSION_DUMP", "FUSION_CACHE_DIR", "FUSION_STRICT", "FUSION_GRAPH_CACHE", "TRITON_CACHE_DIR")


def key_of(
    graph: fx.GraphModule, label: str, options: Options, target: Target, kept: frozenset[int] = frozenset()
) -> str:
    """What a compilation of `graph`, of whose results backward alone gets `kept`, is found by.

    Raises:
        Unwritten: the graph holds what cannot be told in full; the message says what.
    """
    wished = (options.mode, options.workspace, options.numerics, options.cudagraphs)
    return key_for(target, label, wished, _settings(), kept, *_graph(graph))


def surroundings_of(target: Target) -> str:
    """What is read, beside a graph and what was asked, where one is compiled for `target` here and now."""
    return key_for(target, _settings())


def _settings() -> tuple[object, ...]:
    """How PyTorch is set, as far as a compilation looks at it."""
    return torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()


def key_for(target: Target, *told: object) -> str:
    """What is found by `told`, if this compiler makes it for `target` here.

    Raises:
        Unwritten: something cannot be told in full; the message says what.
    """
    able = repr(target.numerics), repr(_sorted(target.capabilities))
    return digest(_sources(), _versions(), _environment(), target.name, target.identity, write((*able, *told), {}))


def _sorted(capabilities: object) -> list[tuple[str, object]]:
    """What a target can do, with sets in an order that is the same in each process."""
    values = {name: getattr(capabilities, name) for name in capabilities.__dataclass_fields__}  # type: ignore[attr-defined]  # a dataclass
    return [(name, sorted(value) if isinstance(value, frozenset) else value) for name, value in values.items()]


@lru_cache(maxsize=1)
def _sources() -> str:
    """The text of this compiler, as it was when it was imported or a moment later."""
    root = Path(__file__).resolve().parents[1]
    folders = os.walk(root, followlinks=True)  # `fusion/lowering` and `fusion/codegen` are links in the repository
    files = sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(_WRITTEN))
    return digest(*(part for path in files for part in (path.relative_to(root).as_posix(), path.read_bytes())))


@lru_cache(maxsize=1)
def _versions() -> str:
    names = ("torch", "triton", "sympy", "networkx")
    built = (torch.version.git_version, torch.version.cuda, torch.version.hip)
    return repr((sys.version, platform.platform(), torch.__version__, *map(_version, names), *built))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _environment() -> str:
    """The variables that a compilation, or a tool that it calls, may look at."""
    told = (pair for pair in os.environ.items() if pair[0].startswith(_SETTINGS) and pair[0] not in _NOT_DECIDING)
    return repr(sorted(told))


# The graph ----------------------------------------------------------------------------------------------------------


def _graph(graph: fx.GraphModule) -> Iterator[object]:
    """Every node, and what is known of sizes."""
    form = Form(graph)
    yield from form.nodes()
    yield from form.facts()


def held_by(graph: fx.GraphModule, node: fx.Node) -> object:
    """What a graph holds for one of its nodes."""
    held: object = graph
    for part in str(node.target).split("."):
        held = getattr(held, part)
    return held


class Form:
    """A graph in plain values: nodes and memory by number, in the order in which they appear.

    Attributes:
        VALUE: what a node says in its `meta` of the value that it gives.
    """

    VALUE = "val"

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.numbers: dict[fx.Node, int] = {}
        self.memory: dict[int, int] = {}
        self.known: dict[ShapeEnv, None] = {}

    def nodes(self) -> Iterator[object]:
        """Every node."""
        yield from map(self.node, self.graph.graph.nodes)

    def facts(self) -> Iterator[object]:
        """What is known of the sizes of the nodes so far."""
        yield from map(_facts, self.known)

    def node(self, node: fx.Node) -> tuple[object, ...]:
        """One node, once those that it reads were told."""
        self.numbers[node] = len(self.numbers)
        origin = origin_of(node)
        marks = [(mark, str(node.meta[mark])) for mark in MARKS if mark in node.meta]
        called = self.target(node)
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        place = (origin.name, origin.module, origin.line)
        return (node.op, node.name, *called, args, kwargs, self.value(node.meta.get(self.VALUE)), place, marks)

    def target(self, node: fx.Node) -> tuple[object, ...]:
        """What a node calls, or holds."""
        if node.op == "get_attr":
            held = held_by(self.graph, node)
            if not isinstance(held, torch.Tensor):
                raise Unwritten(f"{node.target}, a {type(held).__name__}")
            return str(node.target), held
        if isinstance(node.target, OpOverload):
            return str(node.target), str(node.target._schema)
        return (node.target,)

    def _argument(self, arg: object) -> object:
        if isinstance(arg, fx.Node):
            return ("node", self.numbers[arg])
        if isinstance(arg, (list, tuple)):
            return [type(arg).__name__, *map(self._argument, arg)]
        if isinstance(arg, Mapping):
            return {key: self._argument(value) for key, value in arg.items()}
        if isinstance(arg, slice):
            return ("slice", *map(self._argument, (arg.start, arg.stop, arg.step)))
        return ("ellipsis",) if arg is Ellipsis else arg

    def value(self, val: object) -> object:
        """What a node gives, as far as it was traced."""
        if isinstance(val, torch.Tensor):
            return self.tensor(val)
        if isinstance(val, (list, tuple)):
            return [type(val).__name__, *map(self.value, val)]
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size(val)
        return val

    def tensor(self, val: torch.Tensor) -> object:
        """How a tensor lies, and in which memory."""
        if val.layout is not torch.strided:
            raise Unwritten(f"a tensor in the layout {val.layout}")
        own = (val.dtype, val.device, val.requires_grad, val.is_conj(), val.is_neg(), type(val).__name__)
        sizes = [self.size(size) for size in (*val.shape, *val.stride(), val.storage_offset())]
        return (*own, val.ndim, sizes, self.memory.setdefault(val.untyped_storage()._cdata, len(self.memory)))

    def size(self, size: object) -> object:
        """A size that may be symbolic."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        self.known.setdefault(size.node.shape_env)
        return (type(size).__name__, sympy.sympify(size.node.expr), str(size.node.hint))


def _facts(known: ShapeEnv) -> object:
    """What is known of sizes: guards, ranges, which of them are equal, and what is checked at run time."""
    guards = [str(guard.expr) for guard in known.guards]
    ranges = [(str(symbol), str(bounds)) for symbol, bounds in known.var_to_range.items()]
    equal = [(str(symbol), str(other)) for symbol, other in known.replacements.items()]
    checked = [
        (str(symbol), [str(check.expr) for check in all_]) for symbol, all_ in known.deferred_runtime_asserts.items()
    ]
    return guards, ranges, equal, checked


__all__ = ["Form", "held_by", "key_for", "key_of", "surroundings_of"]
