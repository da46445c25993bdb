"""Lists the composite ATen operations that PyTorch's reference decompositions replace before the rules see them.

Output: the table for AOTAutograd or `make_fx`.  An operation with a rule is never decomposed: a rule of our own
gives fewer nodes, rounds 16-bit floats once, and knows the shape of the result.  That includes the refusals of
`rules/library.py`, which leave a call to the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import cast

import torch
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    compute_elementwise_output_logical_to_physical_perm,
    elementwise_dtypes,
    get_computation_dtype,
    is_contiguous_for_memory_format_or_false,
    suggest_memory_format,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion.lowering import rules
from fusion.lowering.aten.foreach import foreach_decompositions
from fusion.lowering.aten.without_library import WITHOUT_LIBRARY
from fusion.lowering.checks.refused_calls import leaving_refused, of_matching_dtypes
from fusion.lowering.registry import RULES

assert rules.__all__, "importing the rules registers them"

aten = torch.ops.aten

BATCH_NORMS: tuple[OpOverloadPacket, ...] = (
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
)
"""Decomposed into `var_mean` and pointwise operations."""

ALSO: tuple[OpOverloadPacket, ...] = (
    *BATCH_NORMS,
    aten.batch_norm_backward,
    # resampling, down to gathers
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
    # the rest
    aten._addmm_activation,
    aten._chunk_cat,
    aten.dist,
    aten.rrelu_with_noise_backward,
    aten.special_ndtr,
    aten.tril_indices,
    aten.triu_indices,
)
"""Decomposed although not among PyTorch's core decompositions."""


FOR_TRAINING: tuple[OpOverloadPacket, ...] = (aten._softmax, aten._log_softmax, aten._log_softmax_backward_data)
"""Decomposed although there is a rule: from the parts, the partitioner sees that backward can recompute the result from
the input and a few numbers per row; of the whole call it would save the full result."""


def _asserted(condition: torch.Tensor) -> None:
    """Assert with a message: PyTorch's trace takes an assertion without one for dead code."""
    aten._assert_async.msg(condition, "Expected Tensor with single nonzero value, but got zero")


def _asserted_by(condition: torch.Tensor, message: str) -> object:
    """Assert with eager's message, where PyTorch's trace of `one_hot` puts a name before it."""
    if not message.startswith("one_hot: "):
        return NotImplemented
    return aten._assert_async.msg(condition, message.removeprefix("one_hot: "))


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    """Compute y·(grad - Σ grad·y), rounded once.  The sum is visible, and may be had from smaller tensors.

    PyTorch's own decomposition, grad·y - y·Σ grad·y, loses digits where grad is nearly constant along a row.
    """
    wide = get_computation_dtype(grad.dtype)
    g, y = grad.to(wide), output.to(wide)
    return (y * (g - (g * y).sum(dim, keepdim=True))).to(input_dtype)


def weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of w = v·(g / |v|), norms |v| over all dimensions but `dim`, with respect to v and g."""
    wide = get_computation_dtype(v.dtype)
    grad_w, direction, scale, size = (x.to(wide) for x in (grad, v, g, norms))
    others = [k for k in range(v.ndim) if k != dim % v.ndim]
    products = grad_w * direction
    along = (products.sum(others, keepdim=True) if others else products) / size
    return ((scale / size) * (grad_w - direction * (along / size))).to(v.dtype), along.to(g.dtype)


def addbmm(
    x: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Compute beta·x + alpha·Σ over the batch as one GEMM, contracted over batch and column at once."""
    lhs = batch1.permute(1, 0, 2).reshape(batch1.shape[1], -1)
    return torch.addmm(x, lhs, batch2.reshape(-1, batch2.shape[2]), beta=beta, alpha=alpha)


def _unless_negative(parts: Callable[..., object]) -> Callable[..., object]:
    """Return the decomposition of a smooth L1 loss; calls with a negative `beta`, which eager refuses, stay calls."""

    def decomposed(x: torch.Tensor, target: torch.Tensor, reduction: int = 1, beta: float = 1.0) -> object:
        return NotImplemented if beta < 0 else parts(x, target, reduction, beta)

    return decomposed


def smooth_l1_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """Compute the gradient of smooth L1; NaN where the difference is NaN: PyTorch's own decomposition gives 0."""
    wide = get_computation_dtype(x.dtype)
    gap, each = x.to(wide) - target.to(wide), grad.to(wide) / (x.numel() if reduction == 1 else 1)
    return torch.where(gap <= -beta, -each, torch.where(gap >= beta, each, each * gap / beta)).to(x.dtype)


def max_unpool(
    x: torch.Tensor, indices: torch.Tensor, output_size: Sequence[int], *windows: Sequence[int]
) -> torch.Tensor:
    """Scatter the elements of x into zeros, each to the position in the last dimensions that `indices` holds.

    PyTorch's own decomposition leaves the result contiguous, where eager keeps channels last on a CPU.
    """
    lead = x.shape[: x.ndim - len(output_size)]
    flat = (*lead, math.prod(x.shape[len(lead) :]))
    zeros = x.new_zeros((*lead, math.prod(output_size)))
    whole = zeros.scatter(-1, indices.reshape(flat), x.reshape(flat)).view(*lead, *output_size)
    as_given = len(output_size) == 2 and x.device.type == "cpu"
    return whole.contiguous(memory_format=suggest_memory_format(x)) if as_given else whole


def _with_eager_format(parts: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]) -> Callable[..., object]:
    """Give the (first) result of a decomposition eager's memory format: contiguous on a CPU, or channels last as x."""

    def laid(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or (x.is_contiguous() and result.is_contiguous()):
            return result
        return result.contiguous(memory_format=suggest_memory_format(x))

    def apart(x: torch.Tensor, *others: object, **options: object) -> object:
        decomposed = parts(x, *others, **options)
        return (
            laid(x, decomposed) if isinstance(decomposed, torch.Tensor) else (laid(x, decomposed[0]), *decomposed[1:])
        )

    return apart


def _not_aliasing(parts: Callable[..., object]) -> Callable[..., object]:
    """Copy the result of a decomposition on a CPU, where eager never returns the operand itself."""

    def apart(x: torch.Tensor, *others: object) -> object:
        result = parts(x, *others)
        return result.clone() if isinstance(result, torch.Tensor) and x.device.type == "cpu" else result

    return apart


def _floored_as_the_first(op: OpOverload) -> Callable[..., object]:
    """Give a floored quotient the layout of its first operand; PyTorch's trace gives it to the other roundings only."""
    decomposed = _as_the_first(op, None)

    def floored(x: torch.Tensor, other: torch.Tensor, *, rounding_mode: str | None) -> object:
        return decomposed(x, other, rounding_mode=rounding_mode) if rounding_mode == "floor" else NotImplemented

    return floored


def nll_loss2d_forward(parts: Callable[..., object]) -> Callable[..., object]:
    """Make the targets contiguous first: the per-pixel loss takes their layout, and eager's is contiguous."""

    def decomposed(x: torch.Tensor, target: torch.Tensor, *others: object) -> object:
        return parts(x, target.contiguous(), *others)

    return decomposed


def as_strided_copy(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Copy a view; the view may reach memory outside the elements of x."""
    return torch.as_strided(x, size, stride, storage_offset).clone(memory_format=torch.contiguous_format)


def _into_shared(scatter: OpOverload) -> Callable[..., object]:
    """Decompose a scatter into a tensor whose elements share memory (stride 0): copy, then scatter, as eager does.

    PyTorch 2.11 traces a result whose elements share memory, too.
    """

    def decomposed(x: torch.Tensor, *others: object, **options: object) -> object:
        sizes = zip(x.shape, x.stride(), strict=True)
        shared = any(statically_known_true(s == 0) and not statically_known_true(n == 1) for n, s in sizes)
        if not shared or statically_known_true(x.numel() == 0):  # a copy of no elements has such strides, too
            return NotImplemented
        return scatter(x.clone(), *others, **options)

    return decomposed


def _or_else(first: Callable[..., object], other: Callable[..., object] | None) -> Callable[..., object]:
    """Return a decomposition that tries `first`, and `other` where `first` returns NotImplemented."""
    if other is None:
        return first

    @wraps(other)
    def decomposed(*args: object, **kwargs: object) -> object:
        result = first(*args, **kwargs)
        return other(*args, **kwargs) if result is NotImplemented else result

    return decomposed


def _keeping_the_format(op: OpOverload) -> Callable[..., object]:
    """Give a result on a CPU the channels-last format of x."""

    def decomposed(x: torch.Tensor, *others: object) -> object:
        kept = suggest_memory_format(x)
        if x.device.type != "cpu" or kept is torch.contiguous_format:
            return NotImplemented
        return op(x.contiguous(), *others).contiguous(memory_format=kept)

    return decomposed


def _of_contiguous(op: OpOverload) -> Callable[..., object]:
    """Make operands contiguous first, so that the result is contiguous whatever their layout."""

    def decomposed(*operands: object, **options: object) -> object:
        copied = [operand.contiguous() if isinstance(operand, torch.Tensor) else operand for operand in operands]
        changed = any(new is not old for new, old in zip(copied, operands, strict=True))
        return op(*copied, **options) if changed else NotImplemented

    return decomposed


def _laid_out(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Copy `other` into the layout of eager's pointwise results, unless an operation on it alone has that layout."""
    if x.ndim == 0 or (x.is_contiguous() and other.is_contiguous()):
        return other
    shape = torch.broadcast_shapes(x.shape, other.shape)  # type: ignore[no-untyped-call]  # PyTorch's own
    pair = x.expand(shape), other.expand(shape)
    order: list[int] = compute_elementwise_output_logical_to_physical_perm(*pair)[0]
    if other.shape == shape:
        lies_so = order == compute_elementwise_output_logical_to_physical_perm(other)[0]
        # With symbolic sizes the order of a dense copy may be undecidable; that it is dense is not.
        if lies_so or _has_no_gaps(other.permute(order)):
            return other
    return pair[1].permute(order).clone(memory_format=torch.contiguous_format).permute(_back(order))


def _has_no_gaps(x: torch.Tensor) -> bool:
    """Return whether `x` is known to be contiguous."""
    return is_contiguous_for_memory_format_or_false(x, memory_format=torch.contiguous_format)


def _back(order: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)


def _as_the_first(op: OpOverload, parts: Callable[..., object] | None) -> Callable[..., object]:
    """Decompose an operation so that its second operand has the layout of the result.

    A 0-d second operand, which may be of another dtype or device, is left as it is.
    """

    def decomposed(x: torch.Tensor | float, other: torch.Tensor | float, **options: object) -> object:
        if isinstance(x, torch.Tensor) and isinstance(other, torch.Tensor):
            order: list[int] = compute_elementwise_output_logical_to_physical_perm(x)[0]
            if other.ndim == 0 and order != sorted(order):
                return op(x.permute(order), other, **options).permute(_back(order))
            copied = other if other.ndim == 0 else _laid_out(x, other)
            if copied is not other:
                return op(x, copied, **options)
        return NotImplemented if parts is None else parts(x, other, **options)

    return decomposed


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: object) -> torch.Tensor:
    """Add the bias after the convolution: on a GPU the library would add it in a kernel of its own; here it fuses."""
    if bias is None or x.device.type == "cpu":
        return cast(torch.Tensor, NotImplemented)
    image: torch.Tensor = aten.convolution.default(x, weight, None, *settings)
    return image + bias.view(-1, *(1,) * (weight.ndim - 2))


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None, *settings: object
) -> Sequence[torch.Tensor | None]:
    """Compute the gradients of a convolution, with that of its bias as a sum."""
    others, wanted = settings[:-1], cast("Sequence[bool]", settings[-1])
    if not wanted[2] or grad.device.type == "cpu":
        return cast(tuple[None, ...], NotImplemented)
    arguments = (grad, x, weight, None, *others, [*wanted[:2], False])
    gradients = aten.convolution_backward.default(*arguments) if any(wanted[:2]) else (None, None, None)
    return gradients[0], gradients[1], grad.sum([0, *range(2, grad.ndim)])


OTHERWISE_ROUNDED: dict[OpOverload, Callable[..., object]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
"""Operations that eager may round at another point; they stay whole where results must equal eager's bit for bit."""


MISTRACED: dict[OpOverload, Callable[..., object]] = {
    aten.zero.default: torch.zeros_like,
    aten.diagonal_scatter.default: _into_shared(aten.diagonal_scatter.default),
    aten.select_scatter.default: _into_shared(aten.select_scatter.default),
    aten.slice_scatter.default: _into_shared(aten.slice_scatter.default),
    aten.div.Tensor_mode: _floored_as_the_first(aten.div.Tensor_mode),
    aten.normal.Tensor_Tensor: _of_contiguous(aten.normal.Tensor_Tensor),
    aten.normal.Tensor_float: _of_contiguous(aten.normal.Tensor_float),
    aten.normal.float_Tensor: _of_contiguous(aten.normal.float_Tensor),
    aten.reflection_pad2d.default: _keeping_the_format(aten.reflection_pad2d.default),
    aten.reflection_pad3d.default: _keeping_the_format(aten.reflection_pad3d.default),
    aten.replication_pad2d.default: _keeping_the_format(aten.replication_pad2d.default),
    aten.replication_pad3d.default: _keeping_the_format(aten.replication_pad3d.default),
}
"""Operations that PyTorch traces with other strides than eager's, some in 2.11 alone; other shapes: `mistraced.py`."""

AS_THE_SECOND: tuple[OpOverload, ...] = (
    aten.copysign.Tensor,
    aten.floor_divide.default,
    aten.special_xlog1py.default,
    aten.xlogy.Tensor,
)
"""Operations whose traced result has the layout of the second operand, where eager's has that of the first."""


def _scaled(parts: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """Decompose a call with a float factor that is symbolic (known at the call only); others stay whole.

    PyTorch passes such a float (a learning rate that a schedule changes) as a tensor where it is an operand of a
    product, and recompiles for each number where it is an option.  16-bit floats are computed in float32, as in eager.
    """

    def decomposed(x: torch.Tensor, *others: object, **options: object) -> object:
        if not any(isinstance(option, torch.SymFloat) for option in options.values()):
            return NotImplemented
        tensors = [operand for operand in (x, *others) if isinstance(operand, torch.Tensor)]
        wide, dtype = elementwise_dtypes(*tensors, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
        if not dtype.is_floating_point:  # refused by eager, or computed in another way
            return NotImplemented
        return parts(*(g.to(wide) if isinstance(g, torch.Tensor) else g for g in (x, *others)), **options).to(dtype)

    return decomposed


KNOWN_AT_THE_CALL: dict[OpOverload, Callable[..., object]] = {
    aten.add.Tensor: _scaled(lambda x, y, *, alpha: x + y * alpha),
    aten.sub.Tensor: _scaled(lambda x, y, *, alpha: x - y * alpha),
    aten.addcmul.default: _scaled(lambda x, a, b, *, value: x + a * b * value),
    aten.addcdiv.default: _scaled(lambda x, a, b, *, value: x + a / b * value),
}
"""Operations with a factor among their options, decomposed into products."""


@lru_cache(maxsize=4)
def decompositions(*, exact: bool = False, library: bool = True) -> dict[OpOverload, Callable[..., object]]:
    """Return overload → decomposition; with `exact`, only decompositions that round as eager does.

    Without a `library`, convolutions and attention are decomposed, too (`without_library.py`).  The same dict each
    time; do not change it.
    """
    # `core_aten_decompositions` also lists composite operations: a trace decomposes those anyway; listing takes 0.1 s.
    table = {**_core_aten_decompositions_post_autograd(), **get_decompositions(ALSO)}
    kept = {target: parts for target, parts in table.items() if target not in RULES}
    kept.update(get_decompositions(FOR_TRAINING))
    kept[aten._softmax_backward_data.default] = softmax_backward
    kept[aten._weight_norm_interface_backward.default] = weight_norm_backward
    kept[aten.addbmm.default] = addbmm
    kept[aten.smooth_l1_loss.default] = _unless_negative(kept[aten.smooth_l1_loss.default])
    kept[aten.smooth_l1_loss_backward.default] = smooth_l1_loss_backward
    if not exact:
        kept.update(OTHERWISE_ROUNDED.items())
    kept[aten._assert_async.default] = _asserted
    kept[aten._assert_async.msg] = _asserted_by
    kept[aten.max_unpool2d.default] = kept[aten.max_unpool3d.default] = max_unpool
    kept[aten.as_strided_copy.default] = as_strided_copy
    kept[aten._neg_view.default] = torch.neg  # a view whose memory holds the numbers that it negates
    volumes = aten.upsample_nearest3d, aten._upsample_nearest_exact3d
    formats = get_decompositions((aten.channel_shuffle, *volumes))
    formats.update((op, of_matching_dtypes(parts)) for op, parts in get_decompositions(BATCH_NORMS).items())
    kept.update({target: _with_eager_format(parts) for target, parts in formats.items()})
    shuffled = aten.channel_shuffle.default
    kept[shuffled] = _not_aliasing(kept[shuffled])
    kept[aten.nll_loss2d_forward.default] = nll_loss2d_forward(kept[aten.nll_loss2d_forward.default])
    kept.update({target: _or_else(parts, kept.get(target)) for target, parts in MISTRACED.items()})
    kept.update({target: _as_the_first(target, kept.get(target)) for target in AS_THE_SECOND})
    kept.update(foreach_decompositions().items())
    kept.update(KNOWN_AT_THE_CALL.items())
    if not library:
        kept.update(WITHOUT_LIBRARY.items())
    overloads = ((target, parts) for target, parts in kept.items() if isinstance(target, OpOverload))
    return {op: leaving_refused(op, parts) for op, parts in overloads}
