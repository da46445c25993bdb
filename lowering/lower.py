"""Lowering: a functional ATen graph becomes a Program.

What enters is an fx GraphModule of functional ATen calls whose nodes carry fake tensors (`meta["val"]`), as AOTAutograd
gives it.  What leaves is a Program that computes the same.  Nothing is refused: a call without a rule, or with
arguments its rule does not take, becomes an Extern that says why.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from lowering import rules
from lowering.builder import GENERATED_DTYPES, Builder, load_of, origin_of
from lowering.errors import Origin, Unsupported
from lowering.expr import Load, as_stored
from lowering.indexing import ONE
from lowering.program import Buffer, BufferRef, Contract, Extern, ExternArg, Node, Program, memory_of, reads, writes
from lowering.registry import RULES
from lowering.seeded import seeded
from lowering.sizes import given_by, size_of, sizes_of, truth_of, write_over
from lowering.value import Shape, Value

assert rules.__all__, "importing the rules registers them"

FxValue: TypeAlias = "Value | sympy.Expr | tuple[FxValue | None, ...] | None"


def lower(
    graph: fx.GraphModule,
    *,
    device: torch.device | None = None,
    contractions: Collection[str] | None = None,
    scatters: Collection[str] | None = None,
    rounded: bool = False,
    small: int = 0,
) -> Program:
    """Lower a functional ATen graph.

    Args:
        device: the device to generate for; calls that touch another one stay externs.  None takes any.
        contractions: names of the fx nodes whose matrix products become Contract nodes, others stay library calls;
            None takes all.
        scatters: operations (of `SCATTER_OPS`) that may be done where sources meet; None takes all.
        rounded: the result of each call is rounded to its dtype also where it is not stored.
        small: matrix products of at most so many multiplications that are no contractions become sums of products.

    Raises:
        Unsupported: the graph as a whole cannot be represented (a value that is neither tensor nor known integer).
    """
    return Lowering(graph, device, contractions, scatters, rounded=rounded, small=small).run()


class Lowering(Builder):
    """One walk over an fx graph: what each fx node's value is, and which buffers hold it as eager would."""

    def __init__(
        self,
        graph: fx.GraphModule,
        device: torch.device | None,
        contractions: Collection[str] | None,
        scatters: Collection[str] | None,
        *,
        rounded: bool = False,
        small: int = 0,
    ) -> None:
        self.graph = graph
        self.device = device
        self.rounded, self.small = rounded, small
        super().__init__(contractions, scatters)
        self.inputs: list[str | sympy.Symbol | None] = []
        self.symbols: set[sympy.Symbol] = set()  # sizes that the inputs tell
        self.constants: dict[str, torch.Tensor] = {}
        self.values: dict[fx.Node, FxValue] = {}
        self.realised: dict[fx.Node, str] = {}
        self.only_calls = False  # realise by calling what eager calls, not by generated nodes

    def run(self) -> Program:
        outputs: tuple[BufferRef | sympy.Expr | None, ...] = ()
        last_writes: list[fx.Node] = []
        given = (node.meta.get("val") for node in self.graph.graph.nodes if node.op == "placeholder")
        write_over(val for val in given if isinstance(val, torch.SymInt))
        for node in self.graph.graph.nodes:
            self.current = node
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "get_attr":
                self.values[node] = self._constant(node)
            elif node.op == "call_function" and _is_last_write(node):
                last_writes.append(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                returned = node.args[0]
                several = returned if isinstance(returned, (tuple, list)) else (returned,)
                outputs = tuple(self._output(arg) for arg in several)
                outputs = self._told_apart(several, outputs)
                self._write_last(last_writes)
            else:
                raise Unsupported(f"fx node of kind {node.op!r}", origin=origin_of(node))
        for name, buffer in self.buffers.items():
            for size in (*buffer.shape, *buffer.strides):
                self._known(size, self.origins[name])
        program = Program(tuple(self.inputs), self.buffers, tuple(self.nodes), outputs, self.origins, self.constants)
        return _without_dead_nodes(program)

    def library(self, out: Buffer, lhs: Value, rhs: Value) -> tuple[Node, ...]:
        """Nodes that compute the product of two operands of the current call by a library call."""
        assert self.current is not None
        sources = {id(self.values[arg]): arg for arg in self.current.all_input_nodes}
        if id(lhs) not in sources or id(rhs) not in sources or len(out.shape) not in (2, 3):
            return ()
        target = torch.ops.aten.mm.default if len(out.shape) == 2 else torch.ops.aten.bmm.default
        nodes, realised = self.nodes, self.realised
        # What is made here exists only if the library is chosen.
        self.nodes, self.realised, self.only_calls = [], dict(realised), True
        args = tuple(BufferRef(self.tensor(sources[id(operand)])) for operand in (lhs, rhs))
        made = tuple(self.nodes)
        self.nodes, self.realised, self.only_calls = nodes, realised, False
        if not all(isinstance(node, Extern) for node in made):
            return ()
        return (*made, Extern((out.name,), target, args, reason="the library is faster here"))

    # fx nodes -------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> FxValue:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            value = self._tensor_buffer(node, val)
            self.inputs.append(self.realised[node])
            if val.layout is torch.strided:
                self.symbols.update(size for size in sizes_of((*val.shape, *val.stride())) if size.is_Symbol)
            return value
        if isinstance(val, torch.SymInt):
            size = size_of(val)
            if size.is_Symbol:
                self.symbols.add(size)
            self.inputs.append(size if size.is_Symbol else None)  # other inputs tell what an expression is
            return size
        if isinstance(val, int):
            self.inputs.append(None)
            return sympy.Integer(val)
        self.inputs.append(None)
        return None

    def _constant(self, node: fx.Node) -> FxValue:
        found: object = self.graph
        for part in str(node.target).split("."):
            found = getattr(found, part)
        if not isinstance(found, torch.Tensor):
            raise Unsupported(f"attribute {node.target} is no tensor", origin=origin_of(node))
        value = self._tensor_buffer(node, found)
        self.constants[self.realised[node]] = found
        return value

    def _tensor_buffer(self, node: fx.Node, val: torch.Tensor) -> Value:
        strides = sizes_of(val.stride()) if val.layout is torch.strided else None
        buffer = self.buffer(val.dtype, sizes_of(val.shape), strides, val.device, node.name)
        self.realised[node] = buffer.name
        return load_of(buffer)

    def _call(self, node: fx.Node) -> FxValue:
        val = node.meta.get("val")
        if node.target is operator.getitem:
            whole, position = node.args
            parts = self.values[whole]  # type: ignore[index]  # getitem's first argument is always a node
            assert isinstance(parts, tuple) and isinstance(position, int)
            return parts[position]
        if isinstance(val, torch.SymBool):
            return truth_of(val)
        if isinstance(val, bool):
            return None
        if isinstance(val, torch.SymInt) and node.all_input_nodes and size_of(val).is_Symbol:
            self._told_by(node, size_of(val))
        if isinstance(val, (torch.SymInt, torch.SymFloat, int)):
            return self._known(size_of(val), origin_of(node))
        target, args, self.given_seed = node.target, node.args, None
        if target is seeded:
            target, seed, *rest = node.args  # type: ignore[assignment]  # the call whose seed is given
            given = self.values[seed]  # type: ignore[index]  # a node
            assert isinstance(given, Value)
            args, self.given_seed = tuple(rest), given
        registered = RULES.get(target) if isinstance(target, OpOverload) else None
        if registered is None:
            return self._extern(node, "no rule")
        before = len(self.nodes), set(self.buffers)
        try:
            self._check_tensors(node)
            result = registered.rule(self, *self._rule_args(args), **self._rule_kwargs(node.kwargs))
        except Unsupported as refusal:
            del self.nodes[before[0] :]
            for name in set(self.buffers) - before[1]:
                del self.buffers[name], self.origins[name]
            return self._extern(node, refusal.message)
        if isinstance(result, tuple):
            metas = node.meta["val"]
            return tuple(
                None if part is None else self._settle(part, meta, registered.lazy)
                for part, meta in zip(result, metas, strict=True)
            )
        return self._settle(result, val, registered.lazy)

    def _settle(self, value: Value, meta: object, lazy: bool) -> Value:
        """A rule's result as it will be read: computed into a buffer unless reading it is free."""
        assert isinstance(meta, torch.Tensor)
        shape = sizes_of(meta.shape)
        agrees = len(shape) == value.rank and all(
            a == b or not (a.is_Integer and b.is_Integer) for a, b in zip(shape, value.shape, strict=True)
        )
        assert agrees and value.dtype is meta.dtype, (
            f"{self.current}: the rule gives {value.dtype}{value.shape}, eager {meta.dtype}{shape}"
        )
        if value.shape != shape:  # the same symbolic sizes in the form that guards have given them
            value = replace(value, shape=shape)
        if self.rounded:
            value = replace(value, expr=as_stored(value.expr))
        if lazy or (isinstance(value.expr, Load) and value.expr.mask is None):
            return value
        return self.map(value, sizes_of(meta.stride()))

    def _check_tensors(self, node: fx.Node) -> None:
        for val in [node.meta.get("val"), *(a.meta.get("val") for a in node.all_input_nodes)]:
            for tensor in val if isinstance(val, (tuple, list)) else (val,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.dtype not in GENERATED_DTYPES:
                    raise Unsupported(f"{tensor.dtype} is not generated")
                if self.device is not None and tensor.device != self.device:
                    raise Unsupported(f"a tensor on {tensor.device} among others on {self.device}")
                if tensor.layout is not torch.strided:
                    raise Unsupported(f"{tensor.layout} tensors are not generated")

    def _rule_args(self, args: tuple[object, ...]) -> list[object]:
        return [self._rule_arg(arg) for arg in args]

    def _rule_kwargs(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        return {key: self._rule_arg(arg) for key, arg in kwargs.items()}

    def _rule_arg(self, arg: object) -> object:
        if isinstance(arg, fx.Node):
            return self.values[arg]
        if isinstance(arg, (list, tuple)):
            return [self._rule_arg(part) for part in arg]
        return arg

    def _known(self, size: sympy.Expr, origin: Origin) -> sympy.Expr:
        """`size`, if the inputs determine it."""
        if not given_by(size) <= self.symbols:
            raise Unsupported(f"the inputs do not tell the size {size}", origin=origin)
        return size

    def _told_by(self, node: fx.Node, size: sympy.Symbol) -> None:
        """Call what gives a number that nothing tells beforehand."""
        if size in self.symbols or not isinstance(node.target, OpOverload):
            return
        args = tuple(self._extern_arg(arg) for arg in node.args)
        reason = "a number that the host waits for"
        self.nodes.append(Extern((None,), node.target, args, impure=True, reason=reason, sizes=((size, 0, None),)))
        self.symbols.add(size)

    # Externs and outputs --------------------------------------------------------------------------------------------

    def _extern(self, node: fx.Node, reason: str) -> FxValue:
        assert callable(node.target)
        is_view = _is_view(node.target)
        args = tuple(self._extern_arg(arg) for arg in node.args)
        kwargs = {key: self._extern_arg(arg) for key, arg in node.kwargs.items()}
        val = node.meta.get("val")
        multiple = isinstance(val, (tuple, list))
        outs: list[str | None] = []
        results: list[Value | None] = []
        told: list[tuple[sympy.Symbol, int, int | None]] = []
        for place, part in enumerate(val if isinstance(val, (tuple, list)) else (val,)):
            if isinstance(part, torch.Tensor):
                for dim, size in enumerate(sizes_of(part.shape)):
                    if size.is_Symbol and size not in self.symbols:
                        told.append((size, place, dim))
                        self.symbols.add(size)
                strides = sizes_of(part.stride()) if part.layout is torch.strided else None
                shape = tuple(self._known(size, origin_of(node)) for size in sizes_of(part.shape))
                buffer = self.buffer(part.dtype, shape, strides, part.device, node.name)
                outs.append(buffer.name)
                results.append(load_of(buffer))
            else:
                outs.append(None)
                results.append(None)
        impure = bool(told) or not isinstance(node.target, OpOverload) or _impure(node.target)
        self.nodes.append(
            Extern(tuple(outs), node.target, args, kwargs, multiple, is_view, impure, reason, tuple(told))
        )
        if multiple:
            return tuple(results)
        if outs[0] is not None:
            self.realised[node] = outs[0]
        return results[0]

    def _write_last(self, calls: Sequence[fx.Node]) -> None:
        """The calls that write to inputs, once all that reads these is made: also what is read lazily, as views are.

        What one of them copies and an earlier one overwrites is put aside first.
        """
        targets: set[str] = set()
        for call in calls:
            self.current = call
            target, source = call.args
            assert isinstance(target, fx.Node) and isinstance(source, fx.Node)
            name = self.tensor(source)
            if memory_of(self.nodes).get(name, name) in targets:
                buffer = self.buffers[name]
                self.realised[source] = self.map(load_of(buffer), buffer.strides).buffer() or name
            targets.add(self.realised[target])
        for call in calls:
            self.current = call
            self.values[call] = self._extern(call, "no rule")

    def _extern_arg(self, arg: object) -> ExternArg:
        if isinstance(arg, fx.Node):
            value, val = self.values[arg], arg.meta.get("val")
            if isinstance(val, torch.SymFloat) or (value is None and val is not None):
                raise Unsupported(f"a {type(val).__name__} is passed to a call", origin=origin_of(arg))
            return BufferRef(self.tensor(arg)) if isinstance(value, Value) else value
        if isinstance(arg, (list, tuple)):
            return (
                tuple(self._extern_arg(part) for part in arg)
                if isinstance(arg, tuple)
                else [self._extern_arg(part) for part in arg]
            )
        if isinstance(arg, dict):
            return {key: self._extern_arg(part) for key, part in arg.items()}
        return arg

    def tensor(self, node: fx.Node, *, fresh: bool = False) -> str:
        """The buffer that holds the result of `node` exactly as eager would have it, made now if there is none.

        With `fresh` it is no buffer of another node unless eager's result would be a view of that: a copy is made.
        """
        if node in self.realised and not (fresh and self._is_copy(node, self.realised[node])):
            return self.realised[node]
        value = self.values[node]
        assert isinstance(value, Value)
        meta = node.meta["val"]
        strides = sizes_of(meta.stride())
        name = value.buffer()
        previous, self.current = self.current, node
        if (
            name is None
            or not _same_layout(self.buffers[name], value.shape, strides)
            or (fresh and self._is_copy(node, name))
        ):
            name = self._by_call(node, value, strides, fresh) or self.map(value, strides).buffer()
        self.current = previous
        assert name is not None
        self.realised[node] = name
        return name

    def _by_call(self, node: fx.Node, value: Value, strides: Shape, fresh: bool) -> str | None:
        """The result of `node` by eager's own call: a view, which moves nothing.  None where a call is not wanted."""
        call = node.args[0] if node.target is operator.getitem else node
        if not isinstance(call, fx.Node) or not isinstance(call.target, OpOverload):
            return None
        is_view = _is_view(call.target)
        if not is_view and not self.only_calls:
            return None
        for source in call.args[:1]:
            if isinstance(source, fx.Node):
                self.tensor(source, fresh=fresh)
        out = self.buffer(value.dtype, value.shape, strides, value.device)
        outs: list[str | None] = [out.name]
        if call is not node:  # one part of several
            outs = [out.name if k == node.args[1] else None for k in range(len(call.meta["val"]))]
        args = tuple(self._extern_arg(arg) for arg in call.args)
        kwargs = {key: self._extern_arg(arg) for key, arg in call.kwargs.items()}
        self.nodes.append(Extern(tuple(outs), call.target, args, kwargs, call is not node, is_view))
        return out.name

    def _is_copy(self, node: fx.Node, name: str) -> bool:
        """Would eager's result of `node` be a copy of what buffer `name` holds, rather than that or a view of it?"""
        owner = self.origins[name].name
        while node.name != owner:
            source = node.args[0] if node.args else None
            is_view = isinstance(node.target, OpOverload) and _is_view(node.target)
            if not isinstance(source, fx.Node) or not (is_view or node.target is operator.getitem):
                return True
            node = source
        return False

    def _output(self, arg: object) -> BufferRef | sympy.Expr | None:
        if isinstance(arg, fx.Node):
            value = self.values[arg]
            if isinstance(value, Value):
                return BufferRef(self.tensor(arg, fresh=True))
            assert not isinstance(value, tuple)
            return value
        if arg is None:
            return None
        if isinstance(arg, int):
            return sympy.Integer(arg)
        raise Unsupported(f"the graph returns {arg!r}")

    def _told_apart(
        self, args: Sequence[object], outputs: Sequence[BufferRef | sympy.Expr | None]
    ) -> tuple[BufferRef | sympy.Expr | None, ...]:
        """The outputs, with a tensor of its own for each node: what is detached shares memory, but is no one object."""
        owners: dict[str, object] = {}
        told: list[BufferRef | sympy.Expr | None] = []
        for arg, out in zip(args, outputs, strict=True):
            if isinstance(out, BufferRef) and owners.setdefault(out.name, arg) is not arg:
                buffer = self.buffers[out.name]
                alias = self.buffer(buffer.dtype, buffer.shape, buffer.strides, buffer.device)
                self.nodes.append(Extern((alias.name,), torch.ops.aten.alias.default, (out,), {}, False, True))
                out = BufferRef(alias.name)
            told.append(out)
        return tuple(told)


def _same_layout(buffer: Buffer, shape: Shape, strides: Shape) -> bool:
    """Does the buffer have this shape, and these strides wherever they matter?"""
    if buffer.shape != shape:
        return False
    if buffer.numel == 0:
        return True
    return all(a == b for a, b, size in zip(buffer.strides, strides, shape, strict=True) if size != ONE)


def _is_view(target: object) -> bool:
    """Does the operation return its first argument's memory?  Reshapes of what is known to be viewable count."""
    if not isinstance(target, OpOverload):
        return False
    if target is torch.ops.aten._unsafe_view.default:
        return True
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _is_last_write(node: fx.Node) -> bool:
    """Is this a copy into an input, as a functional graph has them at its end?"""
    if node.target is not torch.ops.aten.copy_.default or node.users or node.kwargs or len(node.args) != 2:
        return False
    target, source = node.args
    return isinstance(target, fx.Node) and isinstance(source, fx.Node) and target.op == "placeholder"


def _impure(target: OpOverload) -> bool:
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    return seeded or target._schema.is_mutable or target is torch.ops.aten._assert_scalar.default


def _without_dead_nodes(program: Program) -> Program:
    """The program without nodes nothing reads (rules may compute results that the graph does not use)."""
    live = set(program.output_names())
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if live.intersection(writes(node)) or (isinstance(node, Extern) and node.impure):
            kept.append(node)
            live.update(reads(node))
            if isinstance(node, Contract):
                live.update(name for call in node.library for name in (*reads(call), *writes(call)))
    if len(kept) == len(program.nodes):
        return program
    used = {*live, *(name for node in kept for name in writes(node))}
    used.update(name for name in program.inputs if isinstance(name, str))
    used.update(program.output_names())
    return Program(
        program.inputs,
        {name: buffer for name, buffer in program.buffers.items() if name in used},
        tuple(reversed(kept)),
        program.outputs,
        {name: origin for name, origin in program.origins.items() if name in used},
        {name: tensor for name, tensor in program.constants.items() if name in used},
    )
