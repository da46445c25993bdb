"""Notes which tensors the forwards within a CUDA graph have computed, while the graph is captured.

A replay runs everything that one capture holds, in order.  So a backward of the same capture finds what its forward has
just computed, and may overwrite it; a backward that is captured by itself is replayed on whatever the replay before has
left there (`torch.cuda.make_graphed_callables`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeAlias

import torch

Forward: TypeAlias = Callable[[list[object]], tuple[object, ...]]
"""Computes a graph's results from its inputs, a list that it empties."""


class CapturedStorages:
    """The storages that the forwards of a capture have allocated; of the capture that was noted last.

    A storage at the address of one that is gone was created during the same capture.
    """

    def __init__(self) -> None:
        self._noted: tuple[int | None, frozenset[int]] = None, frozenset()

    def note(self, storages: Iterable[int]) -> None:
        """Add storages to those of the current capture."""
        capture, (last, before) = current_capture(), self._noted
        self._noted = capture, frozenset(storages) | (before if capture == last else frozenset())

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether the current capture has computed a tensor; False if captures cannot be told apart."""
        capture, storages = self._noted
        return capture is not None and tensor.untyped_storage()._cdata in storages and capture == current_capture()


COMPUTED = CapturedStorages()


def noting_captures(forward: Forward) -> Forward:
    """Return a forward that notes, while a graph is captured, that its results are computed in that graph."""

    def run(args: list[object]) -> tuple[object, ...]:
        if not torch.cuda.is_current_stream_capturing():
            return forward(args)
        given = set(_storages(args))
        results = forward(args)
        COMPUTED.note(set(_storages(results)) - given)
        return results

    return run


def current_capture() -> int | None:
    """Return the number of the capture of the current stream; None if there is none, or the driver does not tell."""
    ask = _capture_of()
    if ask is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    failed = ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return None if failed or status.value != 1 else number.value


@cache
def _capture_of() -> Callable[..., int] | None:
    """Return the driver's function that tells the status and the number of a stream's capture."""
    library, name = ("libamdhip64.so", "hip") if torch.version.hip else ("libcuda.so.1", "cu")
    try:
        ask: Callable[..., int] = getattr(ctypes.CDLL(library), f"{name}StreamGetCaptureInfo_v2")
    except (OSError, AttributeError):
        return None
    return ask


def _storages(values: Iterable[object]) -> Iterable[int]:
    """Yield the addresses of the storages of tensors on GPUs."""
    return (value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor) and value.is_cuda)
