"""Builds inputs on which derivations break: large means, masked rows, denormals, infinities, ties.

Input: tensors as they were drawn or as a program passes them; output: changed copies in the same layout.  A variance
from raw moments fails for large means; a softmax that is rescaled by exp(−∞ − (−∞)) for rows that are masked out; a
product that was moved past a sum for infinities; a maximum whose position is looked up for ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from fusion.inspect.accuracy import copied
from fusion.lowering.interpret.evaluate import flat_view

_FARTHEST = 2.0**-10
"""A large mean is so large that a number of size 1 beside it is rounded to multiples of this."""
_SINGLY = 4
"""Tensors that are changed one at a time, beside the others as drawn, at most."""
AS_GIVEN = "as given"

Change = Callable[[torch.Tensor], None]
"""Changes the memory of a tensor, which is given as a vector without overlaps, or a tensor row by row."""


def hostile(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the name of each kind of inputs, with the tensors: floats and booleans are changed, integers are not.

    >>> kinds = dict(hostile([torch.tensor([1.0, -2.0, 3.0])]))
    >>> [*kinds]
    ['as given', 'large means', 'denormals', 'ties', 'zeros', 'an infinity in input 0', 'input 0 masked out']
    >>> kinds["ties"], kinds["input 0 masked out"]
    ([tensor([ 1., -1.,  1.])], [tensor([-inf, -inf, -inf])])
    """
    yield AS_GIVEN, _changed(tensors, lambda flat: None, range(len(tensors)))
    floats = [k for k, tensor in enumerate(tensors) if tensor.is_floating_point() and tensor.numel()]
    switches = [k for k, tensor in enumerate(tensors) if tensor.dtype is torch.bool and tensor.numel()]
    for name, change in _TOGETHER.items() if floats else ():
        yield name, _changed(tensors, change, floats)
    for k in floats[:_SINGLY]:
        yield f"an infinity in input {k}", _changed(tensors, _infinite, [k])
        yield f"{'input' if tensors[k].ndim < 2 else 'a row of input'} {k} masked out", _masked(tensors, k)
    for k in switches[:_SINGLY]:
        yield f"a row of input {k} false", _masked(tensors, k)
        yield f"input {k} true", _changed(tensors, lambda flat: flat.fill_(True), [k])


def _changed(
    tensors: Sequence[torch.Tensor], change: Callable[[torch.Tensor], object], places: Sequence[int]
) -> list[torch.Tensor]:
    """Return copies; the memory of those at `places` is changed."""
    copies = [copied(tensor, tensor.dtype) for tensor in tensors]
    for k in places:
        change(flat_view(copies[k]))
    return copies


def _masked(tensors: Sequence[torch.Tensor], place: int) -> list[torch.Tensor]:
    """Return copies; the first row of one, along its last dimension, is −∞, or false."""
    copies = [copied(tensor, tensor.dtype) for tensor in tensors]
    tensor = copies[place]
    row = tensor[(0,) * max(tensor.ndim - 1, 0)]
    flat = torch.empty(0, dtype=row.dtype, device=row.device).set_(
        row.untyped_storage(), row.storage_offset(), *_apart(row)
    )
    flat.fill_(-math.inf if tensor.is_floating_point() else False)
    return copies


def _apart(row: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of a row whose broadcast dimensions are reduced to one element."""
    shape = tuple(1 if stride == 0 else size for size, stride in zip(row.shape, row.stride(), strict=True))
    return shape, row.stride()


def _far(flat: torch.Tensor) -> None:
    flat.add_(max(16.0, _FARTHEST / torch.finfo(flat.dtype).eps))


def _small(flat: torch.Tensor) -> None:
    flat.copy_(flat.sign() * (torch.finfo(flat.dtype).tiny / 4))


def _infinite(flat: torch.Tensor) -> None:
    flat[len(flat) // 2] = math.inf


_TOGETHER: dict[str, Callable[[torch.Tensor], object]] = {
    "large means": _far,
    "denormals": _small,
    "ties": lambda flat: flat.copy_(flat.sign()),
    "zeros": lambda flat: flat.zero_(),
}
"""Changes of all floats at once."""

__all__ = ["AS_GIVEN", "hostile"]
