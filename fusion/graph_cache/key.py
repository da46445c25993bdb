"""Computes the cache key of a graph: everything that decides its compilation, as one text.

Input: an ATen graph with its fake tensors, the options and the target; output: the key.  It covers everything that a
pass may read: operations with their arguments, sizes, strides, dtypes, devices, aliasing, the user's lines, guards on
sizes, settings of PyTorch, the machine, versions, and the sources of this compiler.  A graph that cannot be serialised
in full has no key.
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
from fusion.graph_cache.serialise import Unwritten, write
from fusion.joint.saved import DONATED
from fusion.lowering.builder import origin_of
from fusion.lowering.rules.conversion import ONLY_STORED
from fusion.options import Options

MARKS = ("original_aten", "recompute", ONLY_STORED, DONATED)
"""Metadata of a node that a pass may read, beside its value and its origin."""

_WRITTEN = (".py", ".c", ".h")
_SETTINGS = ("FUSION_", "TRITON_", "CC", "CUDA_HOME", "PTXAS")
_NOT_DECIDING = (
    "FUSION_DUMP",
    "FUSION_OVERRIDE",
    "FUSION_CACHE_DIR",
    "FUSION_STRICT",
    "FUSION_GRAPH_CACHE",
    "FUSION_CLOSE_CALLS",
    "FUSION_PROGRESS",
    "TRITON_CACHE_DIR",
)


def key_of(
    graph: fx.GraphModule, label: str, options: Options, target: Target, kept: frozenset[int] = frozenset()
) -> str:
    """Return the cache key of a compilation of `graph`, of whose results only backward gets those at `kept`.

    Raises:
        Unwritten: the graph cannot be serialised; the message says why.
    """
    return key_and_facts(graph, label, options, target, kept)[0]


def key_and_facts(
    graph: fx.GraphModule, label: str, options: Options, target: Target, kept: frozenset[int] = frozenset()
) -> tuple[str, bool]:
    """Return the cache key of a compilation, and whether it covers facts about sizes, to which guards may be added.

    Raises:
        Unwritten: the graph cannot be serialised; the message says why.
    """
    form = SerialisedGraph(graph)
    wished = (options.mode, options.workspace, options.numerics, options.cudagraphs, options.close_calls)
    nodes = list(form.nodes())
    facts = list(form.facts())
    return key_for(target, label, wished, _settings(), kept, *nodes, *facts), bool(facts)


def surroundings_of(target: Target) -> str:
    """Return the part of a key that depends neither on the graph nor on the options, for `target` and this process."""
    return key_for(target, _settings())


def _settings() -> tuple[object, ...]:
    """Return the settings of PyTorch that a compilation reads."""
    return torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()


def key_for(target: Target, *parts: object) -> str:
    """Return the key of `parts`, on `target`, for this version of the compiler and this machine.

    Raises:
        Unwritten: a part cannot be serialised; the message says which.
    """
    able = repr(target.numerics), repr(_sorted(target.capabilities))
    return digest(
        compiler_version(), _versions(), _environment(), target.name, target.identity, write((*able, *parts), {})
    )


def _sorted(capabilities: object) -> list[tuple[str, object]]:
    """Return the capabilities of a target, with sets in an order that is the same in each process."""
    values = {name: getattr(capabilities, name) for name in capabilities.__dataclass_fields__}  # type: ignore[attr-defined]  # a dataclass
    return [(name, sorted(value) if isinstance(value, frozenset) else value) for name, value in values.items()]


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """Return a hash of this compiler's sources, read at the first call."""
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
    """Return the environment variables that a compilation, or a tool that it calls, may read."""
    variables = (pair for pair in os.environ.items() if pair[0].startswith(_SETTINGS) and pair[0] not in _NOT_DECIDING)
    return repr(sorted(variables))


# The graph ----------------------------------------------------------------------------------------------------------


def held_by(graph: fx.GraphModule, node: fx.Node) -> object:
    """Return the attribute of a graph that one of its nodes refers to."""
    held: object = graph
    for part in str(node.target).split("."):
        held = getattr(held, part)
    return held


class SerialisedGraph:
    """A graph as serialisable values: nodes and storages are numbered in the order of their first use.

    Attributes:
        VALUE: the key of a node's value in its `meta`.
    """

    VALUE = "val"

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.numbers: dict[fx.Node, int] = {}
        self.memory: dict[int, int] = {}
        self.known: dict[ShapeEnv, None] = {}

    def nodes(self) -> Iterator[object]:
        """Yield every node."""
        yield from map(self.node, self.graph.graph.nodes)

    def facts(self) -> Iterator[object]:
        """Yield the known facts about the sizes of the nodes so far."""
        yield from map(_facts, self.known)

    def node(self, node: fx.Node) -> tuple[object, ...]:
        """Return one node; the nodes that it reads come first."""
        self.numbers[node] = len(self.numbers)
        origin = origin_of(node)
        marks = [(mark, str(node.meta[mark])) for mark in MARKS if mark in node.meta]
        marks += [("source_fn_stack", _name_of(call)) for _, call in node.meta.get("source_fn_stack", ())[-1:]]
        called = self.target(node)
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        place = (origin.name, origin.module, origin.line, origin.path)  # the report names and shows them
        return (node.op, node.name, *called, args, kwargs, self.value(node.meta.get(self.VALUE)), place, marks)

    def target(self, node: fx.Node) -> tuple[object, ...]:
        """Return the target of a node, or the tensor that it holds."""
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
        """Return the traced value of a node."""
        if isinstance(val, torch.Tensor):
            return self.tensor(val)
        if isinstance(val, (list, tuple)):
            return [type(val).__name__, *map(self.value, val)]
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size(val)
        return val

    def tensor(self, val: torch.Tensor) -> object:
        """Return the layout of a tensor, and the number of its storage."""
        if val.layout is not torch.strided:
            raise Unwritten(f"a tensor in the layout {val.layout}")
        own = (val.dtype, val.device, val.requires_grad, val.is_conj(), val.is_neg(), type(val).__name__)
        sizes = [self.size(size) for size in (*val.shape, *val.stride(), val.storage_offset())]
        return (*own, val.ndim, sizes, self.memory.setdefault(val.untyped_storage()._cdata, len(self.memory)))

    def size(self, size: object) -> object:
        """Return a size, which may be symbolic."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        self.known.setdefault(size.node.shape_env)
        return (type(size).__name__, sympy.sympify(size.node.expr), str(size.node.hint))


def _facts(known: ShapeEnv) -> object:
    """Return the known facts about sizes: guards, ranges, equalities, and run-time checks."""
    guards = [str(guard.expr) for guard in known.guards]
    ranges = [(str(symbol), str(bounds)) for symbol, bounds in known.var_to_range.items()]
    equal = [(str(symbol), str(other)) for symbol, other in known.replacements.items()]
    checked = [
        (str(symbol), [str(check.expr) for check in all_]) for symbol, all_ in known.deferred_runtime_asserts.items()
    ]
    return guards, ranges, equal, checked


__all__ = ["SerialisedGraph", "compiler_version", "held_by", "key_and_facts", "key_for", "key_of", "surroundings_of"]


def _name_of(function: object) -> str:
    """Return the qualified name of a function, or the text of an object without one."""
    names = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{names[0]}.{names[1]}" if all(names) else str(function)
