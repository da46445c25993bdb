"""Calls exported libraries through their C interface, on tensors of PyTorch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fusion

CODES = {
    torch.int8: (0, 8),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.bool: (6, 8),
}
DTYPES = {pair: dtype for dtype, pair in CODES.items()}

_numbers = itertools.count()


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    pass


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER))


class Described(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", DataType),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_char_p),
    )


class LibraryError(Exception):
    """What a library says about a call that failed."""


def viewed(tensor: torch.Tensor) -> DLTensor:
    """Describe a tensor, which has to stay alive, as DLPack does."""
    numbers = ctypes.c_int64 * max(1, tensor.ndim)
    return DLTensor(
        *(tensor.data_ptr(), 1, 0, tensor.ndim, DataType(*CODES[tensor.dtype], 1)),
        *(numbers(*tensor.shape), numbers(*tensor.stride()), 0),
    )


class Library:
    """An exported library that was opened."""

    def __init__(self, path: Path, weights: Path | None = None) -> None:
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        for name, result in (
            ("fusion_open", ctypes.c_void_p),
            ("fusion_error", ctypes.c_char_p),
            ("fusion_condition", ctypes.c_char_p),
            ("fusion_input", ctypes.POINTER(Described)),
            ("fusion_output", ctypes.POINTER(Described)),
        ):
            getattr(self.library, name).restype = result
        opened = self.library.fusion_open(None if weights is None else str(weights).encode())
        self.model = ctypes.c_void_p(opened)
        if opened is None:
            raise LibraryError(self.error)

    @property
    def error(self) -> str:
        text: bytes = self.library.fusion_error()
        return text.decode()

    @property
    def conditions(self) -> list[str]:
        count = self.library.fusion_condition_count()
        return [self.library.fusion_condition(k).decode() for k in range(count)]

    def described(self, kind: str) -> list[str]:
        """Return the names and shapes of inputs, or of outputs."""
        count = getattr(self.library, f"fusion_{kind}_count")()
        each = [getattr(self.library, f"fusion_{kind}")(k).contents for k in range(count)]
        return [f"{one.name.decode()}: {DTYPES[one.dtype.code, one.dtype.bits]}{one.shape.decode()}" for one in each]

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run on inputs; return the output, or a tuple of several, which are allocated by the library."""
        count = self.library.fusion_output_count()
        outputs = (ctypes.POINTER(Managed) * max(1, count))()
        self.run(inputs, outputs)
        results = []
        for output in outputs[:count]:
            results.append(copied(output.contents.dl_tensor))
            output.contents.deleter(output)
        return results[0] if count == 1 else tuple(results)

    def into(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Run on inputs, and write to outputs."""
        held = [Managed(viewed(output), None, DELETER()) for output in outputs]
        pointers = (ctypes.POINTER(Managed) * max(1, len(held)))(*map(ctypes.pointer, held))
        self.run(inputs, pointers)

    def run(self, inputs: Sequence[torch.Tensor], outputs: Any) -> None:
        views = [viewed(each) for each in inputs]
        pointers = (ctypes.POINTER(DLTensor) * max(1, len(views)))(*map(ctypes.pointer, views))
        if self.library.fusion_run(self.model, pointers, outputs) != 0:
            raise LibraryError(self.error)

    def close(self) -> None:
        self.library.fusion_close(self.model)


def copied(tensor: DLTensor) -> torch.Tensor:
    """Return a copy of a tensor, in the same layout."""
    shape, strides = tensor.shape[: tensor.ndim], tensor.strides[: tensor.ndim]
    result = torch.empty_strided(shape, strides, dtype=DTYPES[tensor.dtype.code, tensor.dtype.bits])
    if result.numel():
        bytes_ = result.untyped_storage().nbytes()
        ctypes.memmove(result.data_ptr(), tensor.data, bytes_)
    return result


def exported(program: Callable[..., object], folder: Path, *args: object, **settings: Any) -> Library:
    """Export a program for these arguments, and open the library."""
    path = folder / f"libprogram{next(_numbers)}.so"
    fusion.export_library(program, path, inputs=args, **settings)
    return Library(path)
