"""Lowers a functional ATen graph to a Program.

Input: an fx GraphModule of functional ATen calls whose nodes carry fake tensors (`meta["val"]`), as AOTAutograd returns
it; output: a Program that computes the same.  Nothing is refused: a call without a rule, or with arguments that its
rule does not take, becomes an Extern with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from fusion.lowering import rules
from fusion.lowering.algebra.dead_code import eliminate_dead_buffers, eliminate_dead_code
from fusion.lowering.algebra.positions import is_free, simplify_all
from fusion.lowering.aten.host import KnownNumbers, is_float_of_numbers, is_number, joins
from fusion.lowering.builder import GENERATED_DTYPES, Wanted, load_of, origin_of
from fusion.lowering.calls import Calls
from fusion.lowering.checks.partly_read import Effect, calls_library, keep_checks
from fusion.lowering.checks.refused_calls import refuse_as_eager, refuse_wide
from fusion.lowering.checks.unused import without_needless_keeps
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.expr import Load, as_stored
from fusion.lowering.ir.program import Buffer, BufferRef, Extern, Node, Program, memory_of
from fusion.lowering.ir.sizes import size_of, sizes_of, truth_of, write_over
from fusion.lowering.random.seeded import seeded
from fusion.lowering.registry import RULES, RegisteredRule, Result
from fusion.lowering.rules.formula import literal
from fusion.lowering.rules.promotion import rounded
from fusion.lowering.rules.recomputed import unrounded
from fusion.lowering.value import FxValue, Value, axis_bounds

assert rules.__all__, "importing the rules registers them"


def lower(
    graph: fx.GraphModule,
    *,
    device: torch.device | None = None,
    contractions: Collection[str] | None = None,
    scatters: Collection[str] | None = None,
    rounded: bool = False,
    small: Mapping[int, int] | None = None,
    scans: bool = True,
    invariant: bool = False,
) -> Program:
    """Lower a functional ATen graph.

    Args:
        device: the device to generate for; calls that touch another one stay externs.  None takes any.
        contractions: names of the fx nodes whose matrix products become Contract nodes, others stay library calls;
            None selects all.
        scatters: operations (of `SCATTER_OPS`) that are generated although indices may collide; None selects all.
        rounded: the result of each call is rounded to its dtype also where it is not stored.
        small: bytes of an element → the most multiplications for which matrix products that are not contractions become
            sums of products; None for no such products.
        scans: scans of floats are generated; else only scans whose order does not matter.
        invariant: elements outside a row may not change the order in which its floats are combined.

    Raises:
        Unsupported: the graph as a whole cannot be represented (a value that is neither tensor nor known integer).
    """
    return Lowering(graph, device, Wanted(contractions, scatters, rounded, small or {}, scans, invariant)).run()


@dataclass(frozen=True, slots=True)
class LoweredCall:
    """One call lowered by itself: its result over buffers named after its operands, and the nodes that it loads."""

    result: FxValue
    nodes: tuple[Node, ...]
    buffers: Mapping[str, Buffer]


def lower_call(node: fx.Node) -> LoweredCall:
    """Lower one call of a graph by itself, as if its operands were the inputs of the graph.

    From the result a pass reads the effect of the call, whatever its name: a transpose is a load.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph = make_fx(lambda x: x.t(), tracing_mode="fake")(torch.ones(2, 3)).graph
    >>> (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)
    >>> lower_call(node).result.expr.index
    (i1, i0)

    Raises:
        Unsupported: the call cannot be represented.
    """
    module = node.graph.owning_module
    assert module is not None, "a graph to lower belongs to a module"
    lowering = Lowering(module, None, Wanted())
    for arg in node.all_input_nodes:
        lowering.builder.current = arg  # its buffer originates from the operand: nothing before that is known here
        val = arg.meta.get("val")
        lowering.calls.values[arg] = size_of(val) if isinstance(val, torch.SymFloat) else lowering.operand(arg)
    lowering.builder.current = node
    return LoweredCall(lowering.call(node), tuple(lowering.builder.nodes), lowering.builder.buffers)


def effect(node: fx.Node) -> Effect:
    """Return the reads of a call, by its rule; no reads if it cannot be lowered by itself."""
    try:
        call = lower_call(node)
    except Unsupported:
        return Effect({}, (), {})
    if calls_library(call.nodes):
        return Effect({}, (), {})
    parts = call.result if isinstance(call.result, tuple) else (call.result,)
    results = {k: part for k, part in enumerate(parts) if isinstance(part, Value)}
    return Effect(results, call.nodes, {name: buffer.shape for name, buffer in call.buffers.items()})


class Lowering:
    """One traversal of an fx graph that assigns a value to each fx node, by its rule or by a call."""

    def __init__(self, graph: fx.GraphModule, device: torch.device | None, wanted: Wanted) -> None:
        self.graph, self.device = graph, device
        self.calls = Calls(wanted)
        self.builder = self.calls.builder
        self.inputs: list[str | sympy.Symbol | None] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.numbers = KnownNumbers()
        self.on_device: dict[fx.Node, Value] = {}  # host numbers, as they are on the device
        self.last_writes: list[fx.Node] = []
        self.added: dict[fx.Node, list[Node]] = {}  # by each call

    def run(self) -> Program:
        """Lower the full graph, without dead nodes."""
        inputs = (node.meta.get("val") for node in self.graph.graph.nodes if node.op == "placeholder")
        write_over(val for val in inputs if isinstance(val, torch.SymInt))
        *nodes, end = self.graph.graph.nodes
        for node in nodes:
            self.builder.current = node
            if node.op == "placeholder":
                self.calls.values[node] = self.operand(node)
            elif node.op == "get_attr":
                self.calls.values[node] = self._constant(node)
            elif node.op != "call_function":
                raise Unsupported(f"fx node of kind {node.op!r}", origin=origin_of(node))
            elif _is_last_write(node):
                self.last_writes.append(node)
            else:
                before = len(self.builder.nodes)
                self.calls.values[node] = self.call(node)
                self.added[node] = self.builder.nodes[before:]
        keep_checks(self.graph.graph, self.calls.builder, self.calls.values, self.added, effect)
        self.builder.current = end
        outputs = self._outputs(end)
        buffers, origins = self.builder.buffers, self.builder.origins
        for name, buffer in buffers.items():
            for size in (*buffer.shape, *buffer.strides):
                self.calls.known(size, origins[name])
        program = Program(tuple(self.inputs), buffers, tuple(self.builder.nodes), outputs, origins, self.constants)
        program = program.edited(library=self.builder.calls)
        return eliminate_dead_buffers(eliminate_dead_code(without_needless_keeps(program)))

    # fx nodes -------------------------------------------------------------------------------------------------------

    def operand(self, node: fx.Node) -> FxValue:
        """Return the value of an input: a tensor in a buffer of its name, a size, or None if nothing is known of it."""
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            value = self._tensor_buffer(node, val)
            self.inputs.append(self.calls.realised[node])
            if val.layout is torch.strided:
                sizes = sizes_of((*val.shape, *val.stride()))
                self.calls.symbols.update(size for size in sizes if isinstance(size, sympy.Symbol))
            return value
        if isinstance(val, torch.SymInt):
            size = size_of(val)
            symbol = size if isinstance(size, sympy.Symbol) else None  # other inputs determine those of an expression
            if symbol is not None:
                self.calls.symbols.add(symbol)
            self.inputs.append(symbol)
            return size
        if isinstance(val, int):
            self.inputs.append(None)
            return sympy.Integer(val)
        self.inputs.append(None)
        return None

    def _constant(self, node: fx.Node) -> FxValue:
        attribute: object = self.graph
        for part in str(node.target).split("."):
            attribute = getattr(attribute, part)
        if isinstance(attribute, fx.GraphModule):
            self.calls.modules[node] = attribute
            return None
        if not isinstance(attribute, torch.Tensor):
            raise Unsupported(f"attribute {node.target} is neither a tensor nor a graph", origin=origin_of(node))
        value = self._tensor_buffer(node, attribute)
        self.constants[self.calls.realised[node]] = attribute
        self.numbers.add(node, attribute)
        return value

    def _tensor_buffer(self, node: fx.Node, val: torch.Tensor) -> Value:
        strides = sizes_of(val.stride()) if val.layout is torch.strided else None
        buffer = self.builder.buffer(val.dtype, sizes_of(val.shape), strides, val.device, node.name)
        self.calls.realised[node] = buffer.name
        return load_of(buffer)

    def call(self, node: fx.Node) -> FxValue:
        """Return the value of a call: by its rule, or by the call itself."""
        val, reason = node.meta.get("val"), self.calls.reason_of_mistraced(node)
        if node.target is operator.getitem:
            whole, position = node.args
            assert isinstance(whole, fx.Node) and isinstance(position, int)
            parts = self.calls.values[whole]
            assert isinstance(parts, tuple)
            return parts[position]
        if isinstance(val, torch.SymBool):
            return truth_of(val)
        if isinstance(val, bool):
            return None
        if isinstance(val, torch.SymInt) and node.all_input_nodes and isinstance(size := size_of(val), sympy.Symbol):
            self.calls.wait_for(node, size)
        if isinstance(val, (torch.SymInt, torch.SymFloat, int)):
            return self.calls.known(size_of(val), origin_of(node))
        return self.calls.extern(node, reason) if reason else self._computed(node)

    def _computed(self, node: fx.Node) -> FxValue:
        """Return the results of a call: by its rule, or by the call if there is no rule or it refuses."""
        target, args = self._seeded(node)
        self.numbers.compute(node)
        registered = RULES.get(target) if isinstance(target, OpOverload) else None
        if registered is None:
            return self.calls.extern(node, "no rule")
        before = self.builder.position
        try:
            self._check_tensors(node)
            refuse_as_eager(node)
            result = self._by_rule(registered, args, node.kwargs)
        except Unsupported as refusal:
            self.builder.roll_back(before)
            if self.device is not None and is_float_of_numbers(node, self.device):
                self._compute_on_device(node, registered)
            return self.calls.extern(node, refusal.message)
        val = node.meta["val"]
        if not isinstance(result, tuple):
            return self._store(result, val, registered.lazy)
        parts = zip(result, val, strict=True)
        return tuple(None if part is None else self._store(part, meta, registered.lazy) for part, meta in parts)

    def _seeded(self, node: fx.Node) -> tuple[object, tuple[object, ...]]:
        """Return the target and the arguments of a call; the seed of a seeded one is passed through the builder."""
        self.builder.given_seed = None
        if node.target is not seeded:
            return node.target, node.args
        target, seed, *args = node.args
        assert isinstance(seed, fx.Node)
        seed_value = self.calls.values[seed]
        assert isinstance(seed_value, Value)
        self.builder.given_seed = seed_value
        return target, tuple(args)

    def _by_rule(self, registered: RegisteredRule, args: Sequence[object], kwargs: Mapping[str, object]) -> Result:
        named = {key: self._rule_arg(arg) for key, arg in kwargs.items()}
        return registered.rule(self.builder, *map(self._rule_arg, args), **named)

    def _compute_on_device(self, node: fx.Node, registered: RegisteredRule) -> None:
        """Compute a host number by the kernels that read it on the device, if that needs no nodes."""
        before = self.builder.position
        try:
            result: Result | None = self._by_rule(registered, node.args, node.kwargs)
        except Unsupported:
            result = None
        if isinstance(result, Value) and self.builder.position == before:
            self.on_device[node] = replace(result, expr=as_stored(result.expr))
        self.builder.roll_back(before)

    def _store(self, value: Value, meta: object, lazy: bool) -> Value:
        """Return a rule's result as it will be read: stored in a buffer, unless reading it is free."""
        assert isinstance(meta, torch.Tensor)
        shape = sizes_of(meta.shape)
        agrees = len(shape) == value.rank and all(
            a == b or not (a.is_Integer and b.is_Integer) for a, b in zip(shape, value.shape, strict=True)
        )
        assert agrees and value.dtype is meta.dtype, (
            f"{self.builder.current}: the rule returns {value.dtype}{value.shape}, eager {meta.dtype}{shape}"
        )
        if value.shape != shape:  # the same symbolic sizes, in the form that guards gave them
            value = replace(value, shape=shape)
        if self.builder.wanted.rounded:
            value = replace(value, expr=as_stored(value.expr))
        if lazy or (isinstance(value.expr, Load) and value.expr.mask is None):
            return value
        (expr,) = simplify_all([value.expr], axis_bounds(value.shape))
        if is_free(expr):
            return replace(value, expr=expr)
        strides, wide = sizes_of(meta.stride()), unrounded(self.builder.current, value.expr)
        if wide is None:
            return self.builder.map(value, strides)
        if isinstance(wide, Load) and wide.mask is None:
            return value
        return rounded(self.builder.map(replace(value, dtype=wide.dtype, expr=wide), strides), value.dtype)

    def _check_tensors(self, node: fx.Node) -> None:
        for val in [node.meta.get("val"), *(a.meta.get("val") for a in node.all_input_nodes)]:
            for tensor in val if isinstance(val, (tuple, list)) else (val,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.dtype not in GENERATED_DTYPES:
                    raise Unsupported(f"{tensor.dtype} is not generated")
                device = self.device
                if device is not None and tensor.device != device and not (is_number(tensor) and joins(node, device)):
                    raise Unsupported(f"a tensor on {tensor.device} among others on {device}")
                if tensor.layout is not torch.strided:
                    raise Unsupported(f"{tensor.layout} tensors are not generated")

    def _rule_arg(self, arg: object) -> object:
        if isinstance(arg, fx.Node):
            return self._on_device(arg)
        if isinstance(arg, (list, tuple)):
            return [self._rule_arg(part) for part in arg]
        return arg

    def _on_device(self, arg: fx.Node) -> FxValue:
        """Return the value of an operand; a host number, as it is on the device."""
        value = self.calls.values[arg]
        if isinstance(value, sympy.Expr):
            refuse_wide(value)
        if self.device is None or not isinstance(value, Value) or value.device == self.device:
            return value
        number = self.numbers[arg]
        if number is not None:
            return Value((), value.dtype, self.device, literal(number, value.dtype))
        if arg not in self.on_device:
            self.on_device[arg] = replace(load_of(self.builder.buffers[self.calls.tensor(arg)]), device=self.device)
        return self.on_device[arg]

    # The end of the graph ---------------------------------------------------------------------------------------------

    def _write_last(self) -> None:
        """Add the copies into inputs, after everything that reads them, also lazily (views).

        The source of one copy that an earlier one overwrites is saved first.  An input that is unchanged is not
        written.
        """
        targets: set[str] = set()
        realised = self.calls.realised
        calls: list[fx.Node] = []
        for call in self.last_writes:
            if self._is_unchanged(call):
                self.calls.values[call] = self.calls.values[call.all_input_nodes[0]]
            else:
                calls.append(call)
        for call in calls:
            self.builder.current = call
            target, source = call.args
            assert isinstance(target, fx.Node) and isinstance(source, fx.Node)
            name = self.calls.tensor(source)
            if memory_of(self.builder.nodes).get(name, name) in targets:
                buffer = self.builder.buffers[name]
                realised[source] = self.builder.map(load_of(buffer), buffer.strides).buffer() or name
            targets.add(realised[target])
        for call in calls:
            self.builder.current = call
            self.calls.values[call] = self.calls.extern(call, "what is changed in place is copied there at the end")

    def _is_unchanged(self, copy: fx.Node) -> bool:
        """Return whether the source of a copy into an input is that input, unchanged."""
        target, source = copy.args
        assert isinstance(target, fx.Node) and isinstance(source, fx.Node)
        value = self.calls.values[source]
        return isinstance(value, Value) and value.buffer() == self.calls.realised[target]

    def _output(self, arg: object) -> BufferRef | sympy.Expr | None:
        if isinstance(arg, fx.Node):
            value = self.calls.values[arg]
            if isinstance(value, Value):
                return BufferRef(self.calls.tensor(arg, fresh=True))
            assert not isinstance(value, tuple)
            if value is None and arg.meta.get("val") is not None:
                raise Unsupported(f"the graph returns {arg}, a {type(arg.meta['val']).__name__}", origin=origin_of(arg))
            return value
        if arg is None:
            return None
        if isinstance(arg, int):
            return sympy.Integer(arg)
        raise Unsupported(f"the graph returns {arg!r}")

    def _outputs(self, end: fx.Node) -> tuple[BufferRef | sympy.Expr | None, ...]:
        """Return the outputs, after the writes to inputs: the inputs that are returned as written come last."""
        returned = end.args[0]
        args = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        owners: dict[str, object] = {}
        before = self._tensors_of([arg for arg in args if arg not in self.last_writes], owners)
        self._write_last()
        self.builder.current = end
        after = self._tensors_of([arg for arg in args if arg in self.last_writes], owners)
        return tuple(next(after if arg in self.last_writes else before) for arg in args)

    def _tensors_of(self, args: Sequence[object], owners: dict[str, object]) -> Iterator[BufferRef | sympy.Expr | None]:
        """Return each argument as a tensor of its own for each node: detached tensors share memory, not identity.

        The earliest node owns the memory, as in eager: autograd forbids writes to a base that is itself a view.  The
        others are views of it, or detached from it, as views of a result with a gradient have one.

        Args:
            owners: the nodes that own the buffers returned so far; the owners of `args` are added.
        """
        outputs: list[BufferRef | sympy.Expr | None] = []
        place: dict[object, int] = {node: k for k, node in enumerate(self.graph.graph.nodes)}
        pairs = list(zip(args, [self._output(arg) for arg in args], strict=True))
        for arg, out in sorted(pairs, key=lambda pair: place.get(pair[0], 0)):
            if isinstance(out, BufferRef):
                owners.setdefault(out.name, arg)
        for arg, out in pairs:
            if isinstance(out, BufferRef) and owners[out.name] is not arg:
                buffer = self.builder.buffers[out.name]
                alias = self.builder.buffer(buffer.dtype, buffer.shape, buffer.strides, buffer.device)
                detached = isinstance(arg, fx.Node) and arg.target is torch.ops.aten.detach.default
                again = torch.ops.aten.detach.default if detached else torch.ops.aten.alias.default
                self.builder.nodes.append(Extern((alias.name,), again, (out,), {}, is_view=True))
                out = BufferRef(alias.name)
            outputs.append(out)
        return iter(outputs)


def _is_last_write(node: fx.Node) -> bool:
    """Return whether this is a copy into an input, as at the end of a functional graph; it may be returned."""
    if node.target is not torch.ops.aten.copy_.default or node.kwargs or len(node.args) != 2:
        return False
    if any(user.op != "output" for user in node.users):
        return False
    target, source = node.args
    return isinstance(target, fx.Node) and isinstance(source, fx.Node) and target.op == "placeholder"
