"""Reads one call of scaled dot-product attention, as Dynamo traced it.

Input: a node of Dynamo's graph, whose values are fake tensors; output: a `Call`: the sizes of the attention as numbers,
and a small graph of the call alone, with the operations that compute its mask.  Calls that are not understood are
refused with `Unsupported`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fusion.dynamo.writes import changes_first
from fusion.lowering.attention import attention
from fusion.lowering.errors import Unsupported
from fusion.schedule.chained.candidates import LEAST_TILE

TARGETS: tuple[Callable[..., object], ...] = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
"""The names of the one call that is priced against its decomposition: a trace would already have decomposed it."""

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RECIPE = 64
"""The most operations of a mask that are copied."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call, priced for its traced sizes.

    Attributes:
        operands: the query, the key and the value, without data.
        inputs: the operands, each once, and the inputs of the mask.
        graph: `inputs` → the result, with attention decomposed.
        options: the arguments that are not tensors.
        mask: the mask as the library would get it.
        order: the dimensions of the result in memory order, the outermost first.
        training: whether there will be a backward.
    """

    operands: tuple[Tensor, Tensor, Tensor]
    inputs: tuple[Tensor, ...]
    graph: fx.GraphModule
    options: Mapping[str, object]
    mask: Tensor | None
    order: tuple[int, ...]
    training: bool

    @property
    def query(self) -> Tensor:
        """The first operand."""
        return self.operands[0]

    @property
    def rows(self) -> int:
        """The number of queries of each head."""
        return self.query.shape[-2]

    @property
    def columns(self) -> int:
        """The number of keys of each head."""
        return self.operands[1].shape[-2]

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of a query (and key), and of a value."""
        return self.query.shape[-1], self.operands[2].shape[-1]

    @property
    def scores(self) -> int:
        """The number of elements of the scores."""
        leading = zip_longest(*(reversed(x.shape[:-2]) for x in self.operands), fillvalue=1)
        return math.prod(max(sizes) for sizes in leading) * self.rows * self.columns

    @property
    def is_causal(self) -> bool:
        """Whether the call says that queries see no later keys."""
        return bool(self.options.get("is_causal"))

    @property
    def computes_mask(self) -> bool:
        """Whether the graph computes the mask, from indices or smaller tensors."""
        steps = (node for node in self.graph.graph.nodes if node.op.startswith("call"))
        return any(node.target is not attention for node in steps)

    def signature(self) -> tuple[object, ...]:
        """Return a value that is equal for calls with equal kernels."""
        tensors = ((x.shape, x.stride(), x.dtype, x.device.type, x.requires_grad) for x in self.inputs)
        numbers = {node: number for number, node in enumerate(self.graph.graph.nodes)}
        steps = (
            (node.op, node.target if node.op.startswith("call") else "", repr(_numbered(node, numbers)))
            for node in numbers
        )
        return (*steps, *tensors, self.training)


def _numbered(node: fx.Node, numbers: Mapping[fx.Node, int]) -> object:
    """Return the arguments of a node, with numbers for nodes."""
    return fx.map_arg((node.args, node.kwargs), lambda arg: f"%{numbers[arg]}")


@dataclass(frozen=True, slots=True)
class AttentionNode:
    """A node that calls attention.

    Attributes:
        autocast: the dtype that floating-point arguments are converted to before the call.
        nested: whether the call is in a graph that another one calls, such as a checkpointed one.
    """

    node: fx.Node
    autocast: torch.dtype | None
    nested: bool


def calls(graph: fx.GraphModule) -> Iterator[AttentionNode]:
    """Yield every call in a graph and its subgraphs."""
    for module in graph.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        entered: list[tuple[str, torch.dtype | None]] = []
        for node in module.graph.nodes:
            if node.target is torch.amp.autocast_mode._enter_autocast:
                device, dtype, enabled, *_ = node.args
                entered.append((device, (dtype or torch.get_autocast_dtype(device)) if enabled else None))
            elif node.target is torch.amp.autocast_mode._exit_autocast:
                del entered[-1:]
            elif node.op == "call_function" and node.target in TARGETS:
                query = _value(node.args[0] if node.args else node.kwargs["query"])
                yield AttentionNode(node, _autocast(query, entered), module is not graph)


def _autocast(query: object, entered: Sequence[tuple[str, torch.dtype | None]]) -> torch.dtype | None:
    if not isinstance(query, Tensor):
        return None
    device = query.device.type
    for kind, dtype in reversed(entered):
        if kind == device:
            return dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def read(attention_node: AttentionNode, mode: FakeTensorMode) -> Call:
    """Return the call of a node, with inputs created in `mode`.

    Raises:
        Unsupported: no kernels could be generated for the call.
    """
    node, autocast = attention_node.node, attention_node.autocast
    arguments = dict(zip(ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    options = {name: value for name, value in arguments.items() if name not in ARGUMENTS[:4]}
    for name, value in options.items():
        if isinstance(value, fx.Node):
            raise Unsupported(f"{name} is not a constant")
    result = _value(node)
    if not isinstance(result, FakeTensor):
        raise Unsupported("the result is not a plain tensor")
    if arguments.get("attn_mask") is not None and options.get("is_causal"):
        raise Unsupported("a mask and is_causal at once")
    training = result.requires_grad and torch.is_grad_enabled()
    if training and attention_node.nested:
        raise Unsupported("in a checkpoint, whose backward recomputes all of forward and would keep the scores")
    if training and options.get("dropout_p"):
        raise Unsupported("in training, dropout's mask would be kept for backward")
    recipe = _Recipe(mode, autocast)
    taken = [recipe.input(arguments.get(name)) for name in ARGUMENTS[:3]]
    query, key, value = (recipe.values[node] for node in taken)
    mask = arguments.get("attn_mask")
    mask_copy = None if mask is None else recipe.copy(mask)
    order = tuple(sorted(range(result.dim()), key=lambda dim: -_number(result.stride(dim))))
    recipe.graph.output((recipe.graph.call_function(attention, (*taken, mask_copy), {**options, "order": order}),))
    whole = None if mask is None else _fresh(_tensor(mask), mode, autocast)
    _check((query, key, value), whole)
    inputs, parts = tuple(recipe.values.values()), fx.GraphModule({}, recipe.graph)
    call = Call((query, key, value), inputs, parts, options, whole, order, training)
    if call.scores < LEAST_TILE:
        raise Unsupported("few scores, not worth a loop over tiles")
    return call


def _check(operands: Sequence[Tensor], mask: Tensor | None) -> None:
    query = operands[0]
    if any(x.dtype is not query.dtype or x.device != query.device for x in operands) or query.dtype not in FLOATS:
        raise Unsupported("operands of other dtypes or devices")
    if any(x.dim() < 2 or not x.numel() for x in operands):
        raise Unsupported("operands without elements, or that are not matrices")
    if mask is not None and mask.dtype is not torch.bool and mask.dtype not in FLOATS:
        raise Unsupported(f"a mask of {mask.dtype}")
    if mask is not None and mask.dim() < 2:
        raise Unsupported("a mask that is no matrix")


class _Recipe:
    """The graph of one call, under construction.

    A mask is followed back to smaller tensors and to constants.
    """

    def __init__(self, mode: FakeTensorMode, autocast: torch.dtype | None) -> None:
        self.mode, self.autocast = mode, autocast
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Tensor] = {}  # of the inputs, in order
        self.copies: dict[fx.Node, fx.Node] = {}

    def input(self, node: object) -> fx.Node:
        if not isinstance(node, fx.Node):
            raise Unsupported("an argument is not a tensor")
        if node not in self.copies:
            self.copies[node] = self.graph.placeholder(f"in{len(self.values)}")
            self.values[self.copies[node]] = _fresh(_tensor(node), self.mode, self.autocast)
        elif self.copies[node].op != "placeholder":
            raise Unsupported("an operand is part of the mask")
        return self.copies[node]

    def copy(self, mask: object) -> fx.Node:
        """Copy the operations that compute the mask, if they can be followed; else make the mask an input."""
        if not isinstance(mask, fx.Node):
            raise Unsupported("the mask is not a tensor")
        needed = _made_of(mask, math.prod(map(_number, _tensor(mask).shape[-2:])))
        if needed is None:
            return self.input(mask)
        for node in needed:
            if node in self.copies:
                continue
            if isinstance(_value(node), Tensor) and not _is_copied(node, needed[node]):
                self.input(node)
            elif isinstance(_value(node), Tensor):
                self.copies[node] = self.graph.node_copy(node, self._argument)
        return self.copies[mask]

    def _argument(self, node: fx.Node) -> fx.Node:
        copy = self.copies.get(node)
        return _constant(node) if copy is None else copy  # type: ignore[return-value]  # a number replaces a node


def _is_copied(node: fx.Node, copied: bool) -> bool:
    return copied and node.op in ("call_function", "call_method")


def _made_of(mask: fx.Node, size: int) -> dict[fx.Node, bool] | None:
    """Return the nodes that a mask depends on, in order, and whether each is recomputed; None if that is unknown."""
    constant: dict[fx.Node, bool] = {}
    nodes: dict[fx.Node, bool] = {}

    def visit(node: fx.Node) -> None:
        if node in nodes:
            return
        if len(nodes) > RECIPE:
            raise Unsupported("too many operations")
        value = _value(node)
        copied = _is_computed(node) and (_is_constant(node, constant) or _elements(value) >= size)
        if copied:
            for arg in node.all_input_nodes:
                visit(arg)
        nodes[node] = copied

    try:
        visit(mask)
    except Unsupported:
        return None
    return nodes


def _is_constant(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Return whether a node depends only on constants and sizes."""
    if node not in known:
        known[node] = False
        tensors = [arg for arg in node.all_input_nodes if isinstance(_value(arg), Tensor)]
        known[node] = _is_computed(node) and all(_is_constant(arg, known) for arg in tensors)
    return known[node]


def _is_computed(node: fx.Node) -> bool:
    """Return whether a node is a function of its arguments that nothing mutates later."""
    if node.op not in ("call_function", "call_method"):
        return False
    return not any(_writes(user) for user in (node, *node.users))


def _writes(node: fx.Node) -> bool:
    """Return whether a call writes to one of its arguments."""
    return "out" in node.kwargs or changes_first(node)


def _elements(value: object) -> int:
    return math.prod(map(_number, value.shape)) if isinstance(value, Tensor) else 0


def _value(node: object) -> object:
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def _tensor(node: object) -> FakeTensor:
    value = _value(node)
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        raise Unsupported("an argument is not a plain tensor")
    return value


def _constant(node: fx.Node) -> object:
    """Return the value of a node that is not a tensor, with numbers for sizes."""
    value = _value(node)
    if isinstance(value, torch.SymInt):
        return _number(value)
    if isinstance(value, (tuple, list)):
        return tuple(_number(each) for each in value)
    if isinstance(value, (int, float, bool, torch.dtype, torch.device)):
        return value
    raise Unsupported("the mask depends on a value of unknown type")


def _number(size: object) -> int:
    """Return a size as it was when the graph was traced.

    Raises:
        Unsupported: it is data-dependent.
    """
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    if not isinstance(hint, int):
        raise Unsupported("a data-dependent size")
    return hint


def _fresh(value: FakeTensor, mode: FakeTensorMode, autocast: torch.dtype | None) -> Tensor:
    """Return a tensor like `value`, after autocast, without data or history."""
    dtype = value.dtype
    if autocast is not None and dtype.is_floating_point and dtype is not torch.float64:
        dtype = autocast
    shape, strides = ([_number(size) for size in sizes] for sizes in (value.shape, value.stride()))
    with mode:
        fresh = torch.empty_strided(shape, strides, dtype=dtype, device=value.device)
    return fresh.requires_grad_(value.requires_grad and torch.is_grad_enabled())
