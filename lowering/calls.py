"""Adds calls of eager's operations for fx nodes, and buffers that hold results in exactly eager's layout.

Input: fx nodes; output: Externs, with the reason why they are called, and names of buffers.  A value that is passed to
a call, or returned, must be as in eager: with the same strides, and a view where eager's is one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from fusion.lowering.builder import Builder, Wanted, load_of, origin_of
from fusion.lowering.checks.unused import KEEP
from fusion.lowering.errors import Origin, Unsupported
from fusion.lowering.indexing import ONE
from fusion.lowering.ir.arguments import map_leaves
from fusion.lowering.ir.expr import Expr, Load, loads
from fusion.lowering.ir.program import Buffer, BufferRef, Extern, ExternArg, Map, Node, reads, writes
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.ir.sizes import given_by, size_of, sizes_of
from fusion.lowering.value import FxValue, Shape, Value, axes_of

DATA_DEPENDENT = ("_unique", "_unique2", "unique_dim", "unique_consecutive", "nonzero", "masked_select")
"""Operations whose result has a data-dependent size, whatever their arguments."""

FASTER = "the library is faster here"
"""Why a product is the library's call where that is chosen."""


class Calls:
    """The values of the fx nodes so far, and the buffers that hold them in eager's layout, computed where needed.

    Attributes:
        builder: receives nodes and buffers.
        values: the value of each fx node.
        symbols: the sizes known so far, from the inputs or from a call's results.
        realised: the buffers that hold results in eager's layout.
        mistraced: fx nodes whose results have another shape than PyTorch traced.
        modules: graph modules that calls run themselves: branches, loop bodies, score functions.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.builder = Builder(wanted, self.library)
        self.values: dict[fx.Node, FxValue] = {}
        self.symbols: set[sympy.Symbol] = set()
        self.realised: dict[fx.Node, str] = {}
        self.mistraced: set[fx.Node] = set()
        self.modules: dict[fx.Node, fx.GraphModule] = {}
        self._only_calls = False  # realise by eager's own calls, not by generated nodes

    def extern(self, node: fx.Node, reason: str) -> FxValue:
        """Add eager's call of `node`, with the reason why it is not generated, and return its result."""
        assert callable(node.target)
        if _is_mistraced(node):
            self.mistraced.add(node)
        is_view = _is_view(node.target)
        for source in node.args[:1] if is_view else ():
            if isinstance(source, fx.Node) and isinstance(self.values[source], Value):
                self.tensor(source, fresh=True)  # the view may be written to, and must not alias a copy's source
        args, kwargs = self.arguments(node)
        val = node.meta.get("val")
        multiple = isinstance(val, (tuple, list))
        results: list[Value | sympy.Expr | None] = []
        known_sizes: list[tuple[sympy.Symbol, int, int | None]] = []
        for place, part in enumerate(val if isinstance(val, (tuple, list)) else (val,)):
            known_sizes.extend((size, place, dim) for size, dim in self._determined_sizes(part).items())
            results.append(self._result(node, part))
        outs = tuple(result.buffer() if isinstance(result, Value) else None for result in results)
        impure = bool(known_sizes) or not isinstance(node.target, OpOverload) or _impure(node.target)
        self.builder.nodes.append(
            Extern(outs, node.target, args, kwargs, multiple, is_view, impure, reason, tuple(known_sizes))
        )
        if multiple:
            return tuple(results)
        if outs[0] is not None:
            self.realised[node] = outs[0]
        return results[0]

    def _determined_sizes(self, result: object) -> dict[sympy.Symbol, int | None]:
        """Return the symbols that only this result determines, each with its dimension, and count them as known.

        A result that is itself a number determines its symbol without a dimension (None).
        """
        dims: dict[sympy.Symbol, int | None] = {}
        sizes = enumerate(sizes_of(result.shape)) if isinstance(result, torch.Tensor) else ()
        for dim, size in ((None, size_of(result)),) if isinstance(result, torch.SymInt) else sizes:
            if isinstance(size, sympy.Symbol) and size not in self.symbols:
                dims.setdefault(size, dim)
        self.symbols.update(dims)
        return dims

    def _result(self, node: fx.Node, result: object) -> Value | sympy.Expr | None:
        """Return a call's result as a value: a tensor in a new buffer of the traced layout, or a known size."""
        if isinstance(result, (int, torch.SymInt)) and not isinstance(result, bool):
            size = size_of(result)
            return size if given_by(size) <= self.symbols else None
        if not isinstance(result, torch.Tensor):
            return None
        strides = sizes_of(result.stride()) if result.layout is torch.strided else None
        shape = tuple(self.known(size, origin_of(node)) for size in sizes_of(result.shape))
        return load_of(self.builder.buffer(result.dtype, shape, strides, result.device, node.name))

    def wait_for(self, node: fx.Node, size: sympy.Symbol) -> None:
        """Add the call that computes a host number, unless its symbol is known."""
        if size in self.symbols or not isinstance(node.target, OpOverload):
            return
        args, kwargs = self.arguments(node)
        reason = "a number that the host waits for"
        determined = ((size, 0, None),)
        self.builder.nodes.append(
            Extern((None,), node.target, args, kwargs, impure=True, reason=reason, sizes=determined)
        )
        self.symbols.add(size)

    def reason_of_mistraced(self, node: fx.Node) -> str:
        """Return why `node` must stay a call: it reads a result of another shape than PyTorch traced.  Empty if not.

        Its own result counts as mistraced then, unless it is a single number.

        Raises:
            Unsupported: it takes sizes as arguments, which may come from that shape.
        """
        read = next((arg for arg in node.all_input_nodes if arg in self.mistraced), None)
        if read is None:
            return ""
        reason = f"PyTorch traced what it reads ({read.name}) as if its size were known"
        if isinstance(node.target, OpOverload) and "SymInt" in str(node.target._schema):
            raise Unsupported(f"{reason}: {node.target}", origin=origin_of(node))
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.ndim > 0:
            self.mistraced.add(node)
        return reason

    def arguments(self, node: fx.Node) -> tuple[tuple[ExternArg, ...], dict[str, ExternArg]]:
        """Return the arguments of a call, by position and by name; tensors without a buffer are realised."""
        return map_leaves(node.args, self._passed), map_leaves(node.kwargs, self._passed)

    def _passed(self, arg: object) -> ExternArg:
        if not isinstance(arg, fx.Node):
            return arg
        if arg in self.modules:
            return self.modules[arg]
        value, val = self.values[arg], arg.meta.get("val")
        if isinstance(val, torch.SymFloat) or (value is None and val is not None):
            raise Unsupported(f"a {type(val).__name__} is passed to a call", origin=origin_of(arg))
        return BufferRef(self.tensor(arg)) if isinstance(value, Value) else value

    def tensor(self, node: fx.Node, *, fresh: bool = False) -> str:
        """Return the buffer that holds the result of `node` in eager's layout, computing it now if there is none.

        With `fresh` it shares no buffer with another node unless eager's result is a view of that one: it is a copy.
        """
        if node in self.realised and not (fresh and self._reads_a_copied(node)):
            return self.realised[node]
        value = self.values[node]
        assert isinstance(value, Value)
        meta = node.meta["val"]
        strides = sizes_of(meta.stride())
        name = value.buffer()
        previous, self.builder.current = self.builder.current, node
        if (
            name is None
            or not _same_layout(self.builder.buffers[name], value.shape, strides)
            or self.builder.buffers[name].device != meta.device
            or (fresh and self._is_copy(node, name))
        ):
            name = self._reshape_ones(node, value, strides, fresh) if fresh or self._only_calls else None
            name = name or self._by_call(node, value, strides, fresh) or self.builder.map(value, strides).buffer()
        self.builder.current = previous
        assert name is not None
        self.realised[node] = name
        return name

    def _reshape_ones(self, node: fx.Node, value: Value, strides: Shape, fresh: bool) -> str | None:
        """Return a view of the buffer that `value` loads, if they differ in dimensions of size 1 alone (keepdim).

        Later views of that result then share its memory, as in eager.
        """
        if not isinstance(value.expr, Load) or value.expr.mask is not None:
            return None
        if (fresh and self._is_copy(node, value.expr.buffer)) or self._has_another_base(node, value.expr.buffer):
            return None
        whole, axes = self.builder.buffers[value.expr.buffer], axes_of(value.shape)
        if whole.device != value.device:
            return None
        here = [part for part in zip(axes, value.shape, strides, strict=True) if part[1] != ONE]
        there = zip(value.expr.index, whole.shape, whole.strides, strict=True)
        if here != [part for part in there if part[1] != ONE]:
            return None
        out = self.builder.buffer(value.dtype, value.shape, strides, value.device)
        shape: list[sympy.Expr] = list(value.shape)
        self.builder.nodes.append(
            Extern((out.name,), torch.ops.aten.view.default, (BufferRef(whole.name), shape), is_view=True)
        )
        return out.name

    def _by_call(self, node: fx.Node, value: Value, strides: Shape, fresh: bool) -> str | None:
        """Return the result of `node` by eager's own call if that is a view or only calls are allowed; else None."""
        call = node.args[0] if node.target is operator.getitem else node
        if not isinstance(call, fx.Node) or not isinstance(call.target, OpOverload):
            return None
        is_view = _is_view(call.target)
        if not is_view and (not self._only_calls or is_copy(value.expr)):
            return None
        for source in call.args[:1]:
            if isinstance(source, fx.Node) and isinstance(self.values[source], Value):  # not a size
                self.tensor(source, fresh=fresh)
        out = self.builder.buffer(value.dtype, value.shape, strides, value.device)
        outs: list[str | None] = [out.name]
        if call is not node:  # one part of several
            outs = [out.name if k == node.args[1] else None for k in range(len(call.meta["val"]))]
        args, kwargs = self.arguments(call)
        self.builder.nodes.append(Extern(tuple(outs), call.target, args, kwargs, call is not node, is_view))
        return out.name

    def _is_copy(self, node: fx.Node, name: str) -> bool:
        """Return whether eager's result of `node` is a copy of buffer `name`, neither that buffer nor a view of it."""
        owner = self.builder.origins[name].name
        while node.name != owner:
            source = node.args[0] if node.args else None
            is_view = isinstance(node.target, OpOverload) and _is_view(node.target)
            if not isinstance(source, fx.Node) or not (is_view or node.target is operator.getitem):
                return True
            node = source
        return False

    def _reads_a_copied(self, node: fx.Node) -> bool:
        """Return whether `node`, or a base of its view, is held by a buffer that eager would have copied."""
        viewed: object = node
        while isinstance(viewed, fx.Node):
            if viewed in self.realised and self._is_copy(viewed, self.realised[viewed]):
                return True
            is_view = isinstance(viewed.target, OpOverload) and _is_view(viewed.target)
            viewed = viewed.args[0] if is_view or viewed.target is operator.getitem else None
        return False

    def _has_another_base(self, node: fx.Node, name: str) -> bool:
        """Return whether eager's result of `node` is a view of a result that is held in another buffer than `name`."""
        while isinstance(node.target, OpOverload) and _is_view(node.target) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
            if self.realised.get(node, name) != name:
                return True
        return False

    def library(self, out: Buffer, lhs: Value, rhs: Value) -> tuple[Node, ...]:
        """Return nodes that compute the product of two operands of the current call by a library call.

        Copies that eager makes for it are maps, which may fuse into the kernel of their source.  Products of 16-bit
        floats that are not rounded are the library's on a GPU; on a CPU its products of widened operands.
        """
        sources = {id(self.values[arg]): arg for arg in self.builder.current.all_input_nodes}
        if id(lhs) not in sources or id(rhs) not in sources or len(out.shape) not in (2, 3):
            return ()
        packet = torch.ops.aten.mm if len(out.shape) == 2 else torch.ops.aten.bmm
        target, others = packet.default, tuple[ExternArg, ...]()
        if lhs.dtype is torch.int8 and out.dtype is not lhs.dtype:
            target = torch.ops.aten._int_mm.default
        if lhs.dtype in HALVES and out.dtype is not lhs.dtype:
            if out.device.type == "cpu":
                with self._separate_nodes() as nodes:
                    self.builder.multiply_widened(out, lhs, rhs, FASTER)
                return tuple(nodes)
            target, others = packet.dtype, (out.dtype,)
        realised = self.realised
        with self._separate_nodes() as nodes:
            args = tuple(BufferRef(self.tensor(sources[id(operand)])) for operand in (lhs, rhs))
        product = Extern((out.name,), target, (*args, *others), reason=FASTER)
        call_nodes = (*nodes, product)
        inputs = {name for source, name in realised.items() if source.op != "call_function"}
        wanted = {load.buffer for load in loads(lhs.expr, rhs.expr)}
        read = {name for node in call_nodes for name in reads(node)} - {
            name for node in call_nodes for name in writes(node)
        }
        calls = all(isinstance(node, Extern) or (isinstance(node, Map) and is_copy(node.expr)) for node in call_nodes)
        if not calls or (read ^ wanted) - inputs:
            return ()  # a buffer that only one of the two forms reads would be missing, or computed for nothing
        return call_nodes

    @contextmanager
    def _separate_nodes(self) -> Iterator[list[Node]]:
        """Realise by calls alone, into the list that is yielded, so that the nodes exist only if they are chosen."""
        nodes, realised = self.builder.nodes, self.realised
        self.builder.nodes, self.realised, self._only_calls = [], dict(realised), True
        try:
            yield self.builder.nodes
        finally:
            self.builder.nodes, self.realised, self._only_calls = nodes, realised, False

    def known(self, size: sympy.Expr, origin: Origin) -> sympy.Expr:
        """Return `size` if the inputs determine it, else refuse."""
        if not given_by(size) <= self.symbols:
            raise Unsupported(f"the inputs do not determine the size {size}", origin=origin)
        return size


def is_copy(expr: Expr) -> bool:
    """Return whether an expression only loads another tensor's element, so that a map of it is a copy."""
    return isinstance(expr, Load) and expr.mask is None and not any(isinstance(index, Expr) for index in expr.index)


def _same_layout(buffer: Buffer, shape: Shape, strides: Shape) -> bool:
    """Return whether a buffer has this shape, and these strides in every dimension that has more than one element."""
    if buffer.shape != shape:
        return False
    if buffer.numel == 0:
        return True
    return all(a == b for a, b, size in zip(buffer.strides, strides, shape, strict=True) if size != ONE)


def _is_mistraced(node: fx.Node) -> bool:
    """Return whether a data-dependent result was traced with a fixed size, as PyTorch 2.11 traces `_unique`."""
    if not isinstance(node.target, OpOverload) or node.target._schema.name.removeprefix("aten::") not in DATA_DEPENDENT:
        return False
    val, inputs = node.meta.get("val"), [arg.meta.get("val") for arg in node.all_input_nodes]
    results = val if isinstance(val, (tuple, list)) else (val,)
    sizes = [size for part in results if isinstance(part, torch.Tensor) for size in sizes_of(part.shape)]
    counts = [arg.numel() for arg in inputs if isinstance(arg, torch.Tensor)]
    return all(size.is_Integer for size in sizes) and not any(isinstance(n, int) and n < 2 for n in counts)


def _is_view(target: object) -> bool:
    """Return whether an operation returns a view of its first argument; `_unsafe_view` counts as one."""
    if not isinstance(target, OpOverload):
        return False
    if target is torch.ops.aten._unsafe_view.default:
        return True
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


ASSERTIONS = frozenset(
    {
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
    }
)
"""Operations without a result that fail where a condition does not hold."""


def _impure(target: OpOverload) -> bool:
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    return seeded or target._schema.is_mutable or target in ASSERTIONS or target is KEEP
