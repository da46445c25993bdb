"""Decomposes PyTorch's native transformer calls: whole encoder layers, and attention with its projections.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call these in inference, and nothing can be fused across such a
call: norms, residual sums and activations would be the library's, one by one.  Input: Dynamo's graph, with the graphs
that it calls; it is changed in place.  Calls with a mask stay, since a row whose keys are all masked is a matter of the
native kernel; so do calls on nested tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, fx


def decompose_native_attention(graph: fx.GraphModule) -> None:
    """Replace native calls by the operations that compute them.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty
    >>> def f(x, w, b, p, c):
    ...     return torch._native_multi_head_attention(x, x, x, 4, 2, w, b, p, c, need_weights=False)[0]
    >>> show_captured(decompose_native_attention, f, empty(1, 3, 4), empty(12, 4), empty(12), empty(4, 4), empty(4))
    - _native_multi_head_attention = _native_multi_head_attention(l_x_, l_x_, l_x_, 4, 2, l_w_, l_b_, l_p_, l_c_,
            need_weights=False)
    - getitem = getitem(_native_multi_head_attention, 0)
    - return getitem
    + linear = linear(l_x_, l_w_, l_b_)
    + unflatten = unflatten(linear, -1, (3, 2, -1))
    + permute = permute(unflatten, 2, 0, 3, 1, 4)
    + getitem_2 = getitem(permute, 0)
    + getitem_3 = getitem(permute, 1)
    + getitem_4 = getitem(permute, 2)
    + scaled_dot_product_attention = scaled_dot_product_attention(getitem_2, getitem_3, getitem_4)
    + transpose = transpose(scaled_dot_product_attention, 1, 2)
    + flatten = flatten(transpose, 2)
    + linear_1 = linear(flatten, l_p_, l_c_)
    + return linear_1
    """
    for _, part in graph.named_children():
        if isinstance(part, fx.GraphModule):
            decompose_native_attention(part)
    changed = False
    for native, parts in _PARTS.items():
        for node in graph.graph.find_nodes(op="call_function", target=native):
            arguments = _arguments(node)
            if _can_decompose(node, arguments):
                _replace(node, parts, arguments)
                changed = True
    if changed:
        graph.recompile()


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
) -> tuple[Tensor, ...]:
    """Compute a layer of a transformer encoder over `src` [batch, positions, embed_dim]."""

    def attended(x: Tensor) -> Tensor:
        x, _ = attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, need_weights=False
        )
        return x

    def fed_forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attended(norm(src, norm_weight_1, norm_bias_1))
        return (x + fed_forward(norm(x, norm_weight_2, norm_bias_2)),)
    x = norm(src + attended(src), norm_weight_1, norm_bias_1)
    return (norm(x + fed_forward(x), norm_weight_2, norm_bias_2),)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    need_weights: bool = True,
    average_attn_weights: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Project [batch, positions, embed_dim], attend with `num_head` heads, and project; with the weights if needed."""

    def heads(x: Tensor, first: int) -> Tensor:
        rows = slice(first * embed_dim, (first + 1) * embed_dim)
        return torch.unflatten(F.linear(x, qkv_weight[rows], qkv_bias[rows]), -1, (num_head, -1)).transpose(1, 2)

    if query is key and key is value:
        parts = torch.unflatten(F.linear(query, qkv_weight, qkv_bias), -1, (3, num_head, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
    else:
        q, k, v = heads(query, 0), heads(key, 1), heads(value, 2)
    if need_weights:
        weights = torch.softmax(q * (embed_dim // num_head) ** -0.5 @ k.transpose(-1, -2), -1)
        seen = weights @ v
    else:
        weights, seen = None, F.scaled_dot_product_attention(q, k, v)
    result = F.linear(seen.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    return result, weights.mean(1) if weights is not None and average_attn_weights else weights


_PARTS: Mapping[Callable[..., object], Callable[..., tuple[Tensor | None, ...]]] = {
    torch._transformer_encoder_layer_fwd: encoder_layer,
    torch._native_multi_head_attention: attention,
}


_MASKS = ("mask", "mask_type")


def _arguments(node: fx.Node) -> dict[str, object]:
    """Return the arguments of a native call by name, except defaults."""
    schema = getattr(torch.ops.aten, getattr(node.target, "__name__", "")).default._schema
    return {**dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)), **node.kwargs}


def _can_decompose(node: fx.Node, arguments: Mapping[str, object]) -> bool:
    """Return whether a call has no mask, dense tensors, and only results that the parts return, too."""
    operands = [operand.meta.get("example_value") for operand in node.all_input_nodes]
    dense = all(isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested for x in operands)
    needed = arguments.get("need_weights", True) or 1 not in _read(node).values()
    return arguments.get("mask") is None and dense and bool(needed)


def _replace(node: fx.Node, parts: Callable[..., tuple[Tensor | None, ...]], arguments: Mapping[str, object]) -> None:
    """Replace a call by the operations of `parts`, each with its own fake result."""
    tracer = fx.proxy.GraphAppendingTracer(node.graph)
    proxies: dict[object, object] = {operand: fx.Proxy(operand, tracer) for operand in node.all_input_nodes}
    with node.graph.inserting_before(node):
        before = node.prev
        results = parts(**{name: proxies.get(given, given) for name, given in arguments.items() if name not in _MASKS})
    added = before.next
    while added is not node:
        added.meta.update({key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta})
        added.meta["example_value"] = _computed(added)
        added = added.next
    for reader, place in _read(node).items():
        result = results[place]
        assert isinstance(result, fx.Proxy), "only what the parts return is read"
        reader.replace_all_uses_with(result.node)
        node.graph.erase_node(reader)
    if not isinstance(node.meta["example_value"], Tensor):
        node.graph.erase_node(node)


def _read(node: fx.Node) -> dict[fx.Node, int]:
    """Return the nodes that stand for the results of a call, each with its position."""
    if isinstance(node.meta["example_value"], Tensor):
        return {node: 0}
    return {user: place for user in node.users if isinstance(place := user.args[1], int)}


def _computed(node: fx.Node) -> object:
    """Return the result of a call on the fake results of its operands."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda operand: operand.meta["example_value"])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


__all__ = ["decompose_native_attention"]
