"""Reads one call of scaled dot-product attention, as Dynamo traced it.

Input: a node of Dynamo's graph, whose values are fake tensors, and its mask; output: a `Call`: the sizes of the
attention as numbers.  Calls that are not understood are refused with `Unsupported`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import Argument

from fusion.attention.masks import Mask
from fusion.attention.recipe import number, tensor_of, value_of, without_data
from fusion.lowering.errors import Unsupported

TARGETS: tuple[Callable[..., object], ...] = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
"""The names of the one call that is priced against its decomposition: a trace would already have decomposed it."""

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
ATTENTION_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Call:
    """A call, priced for its traced sizes.

    Attributes:
        operands: the query, the key and the value, without data.
        mask: the summand of the scores.
        options: the arguments that are not tensors.
        order: the dimensions of the result in memory order, the outermost first.
        training: whether there will be a backward.
    """

    operands: tuple[Tensor, Tensor, Tensor]
    mask: Mask | None
    options: Mapping[str, object]
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
    def mask_is_trained(self) -> bool:
        """Whether backward computes the gradient of the mask."""
        return self.training and self.mask is not None and self.mask.tensor.requires_grad

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arguments of the library that are tensors, without data."""
        return (*self.operands, *([] if self.mask is None else [self.mask.tensor]))

    def signature(self) -> tuple[object, ...]:
        """Return a value that is equal for calls of equal price."""
        tensors = ((x.shape, x.stride(), x.dtype, x.device.type, x.requires_grad) for x in self.tensors)
        value = None if self.mask is None else self.mask.value
        return (*tensors, value, *sorted(self.options.items()), self.training)


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

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments by name."""
        return dict(zip(ARGUMENTS, self.node.args, strict=False)) | dict(self.node.kwargs)


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
                query = value_of(node.args[0] if node.args else node.kwargs["query"])
                yield AttentionNode(node, _autocast(query, entered), module is not graph)


def _autocast(query: object, entered: Sequence[tuple[str, torch.dtype | None]]) -> torch.dtype | None:
    if not isinstance(query, Tensor):
        return None
    device = query.device.type
    for kind, dtype in reversed(entered):
        if kind == device:
            return dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def settle(attention_node: AttentionNode, mask: Mask) -> bool:
    """Drop the mask of a call if it hides nothing, or exactly the columns after each row; return whether it did."""
    node, arguments = attention_node.node, attention_node.arguments
    if not (mask.hides_nothing or mask.is_causal) or arguments.get("is_causal"):
        return False
    node.args = tuple(arguments.pop(name) for name in ARGUMENTS[:3])
    node.kwargs = {**arguments, "attn_mask": None, "is_causal": not mask.hides_nothing}
    return True


def read(attention_node: AttentionNode, mask: Mask | None, mode: FakeTensorMode) -> Call:
    """Return the call of a node, with operands created in `mode`.

    Raises:
        Unsupported: no kernels could be generated for the call.
    """
    node, arguments = attention_node.node, attention_node.arguments
    options = {name: value for name, value in arguments.items() if name not in ARGUMENTS[:4]}
    for name, value in options.items():
        if isinstance(value, fx.Node):
            raise Unsupported(f"{name} is not a constant")
    result = value_of(node)
    if not isinstance(result, FakeTensor):
        raise Unsupported("the result is not a plain tensor")
    if mask is not None and options.get("is_causal"):
        raise Unsupported("a mask and is_causal at once")
    training = result.requires_grad and torch.is_grad_enabled()
    if training and attention_node.nested:
        raise Unsupported("in a checkpoint, whose backward recomputes all of forward and would keep the scores")
    if training and options.get("dropout_p"):
        raise Unsupported("in training, dropout's mask would be kept for backward")
    query, key, value = (
        without_data(tensor_of(arguments.get(name)), mode, attention_node.autocast) for name in ARGUMENTS[:3]
    )
    order = tuple(sorted(range(result.dim()), key=lambda dim: -number(result.stride(dim))))
    call = Call((query, key, value), mask, options, order, training)
    if (
        any(x.dtype is not query.dtype or x.device != query.device for x in call.operands)
        or query.dtype not in ATTENTION_DTYPES
    ):
        raise Unsupported("operands of other dtypes or devices")
    if any(x.dim() < 2 or not x.numel() for x in call.operands):
        raise Unsupported("operands without elements, or that are not matrices")
    return call
