"""Addresses under Triton's interpreter: the unmasked lanes of an access are within one tensor.

The interpreter reads and writes any address.  Within `checked()` an access raises unless its lanes are all in one
tensor of the kernel's arguments.  Some kernels may do more: read all of the word that a tensor ends in
(`codegen/triton/blocks/aligned_rows.py`), or read two tensors at once (`products/stacked.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from fusion.codegen.triton.blocks.dims import WORD


class OutsideTensors(Exception):  # no AssertionError, which is how a kernel's own checks fail
    """A kernel accesses memory outside of its tensors."""


@contextmanager
def checked() -> Iterator[None]:
    """Check each access of the kernels that are launched within."""
    memory = _Memory(interpreter._interpreter)
    note = interpreter.GridExecutor._init_args_hst

    def noted(executor: Any, args: Any, kwargs: Any) -> Any:
        given = note(executor, args, kwargs)
        memory.spans = [span(tensor) for tensor in _tensors((*given[0], *given[1].values()))]
        text = inspect.getsource(sys.modules[executor.fn.__module__])
        memory.word, memory.joins = WORD if "_words = " in text else 1, "tl.pointer_type(" in text
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", memory)
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", noted)
        yield


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the address after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = last + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in given:
        if isinstance(each, TensorDescriptor):
            yield each.base
        elif isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from _tensors(each)


class _Memory:
    """The interpreter's reads and writes.

    Attributes:
        spans: the addresses that may be accessed.
        word: reads end at a multiple of this number of bytes.
        joins: one access may span several tensors.
    """

    def __init__(self, accesses: Any) -> None:
        self._accesses = accesses
        self.spans: list[tuple[int, int]] = []
        self.word, self.joins = 1, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accesses, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: np.dtype[Any]) -> Any:
        self._check("reads", addresses, mask, dtype.itemsize, self.word)
        return self._accesses.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._check("writes", addresses, mask, np.asarray(values).itemsize)
        return self._accesses.store(addresses, values, mask)

    def atomic_rmw(self, op: Any, addresses: Any, values: Any, mask: Any, order: Any) -> Any:
        self._check("updates", addresses, mask, np.asarray(values).itemsize)
        return self._accesses.atomic_rmw(op, addresses, values, mask, order)

    def atomic_cas(self, addresses: Any, compared: Any, values: Any, order: Any) -> Any:
        self._check("updates", addresses, True, np.asarray(values).itemsize)
        return self._accesses.atomic_cas(addresses, compared, values, order)

    def _check(self, verb: str, addresses: Any, mask: Any, width: int, word: int = 1) -> None:
        addresses, mask = np.broadcast_arrays(np.asarray(addresses), np.asarray(mask, dtype=bool))
        reached = addresses[mask]
        if not reached.size:
            return
        first, end = int(reached.min()), int(reached.max()) + width
        inside = np.zeros(reached.shape, dtype=bool)
        for start, stop in self.spans:
            lanes = (reached >= start) & (reached + width <= -(-stop // word) * word)
            if lanes.all():
                return
            inside |= lanes
        if not (self.joins and inside.all()):
            start, stop = min(self.spans, key=lambda each: abs(each[0] - first), default=(0, 0))
            raise OutsideTensors(f"{verb} bytes {first - start} to {end - start} of a tensor of {stop - start} bytes")
