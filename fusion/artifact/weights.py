"""Writes and reads tensors in the safetensors format, on CPUs.

Input: tensors by name; output: bytes, or the reverse.  The format (https://github.com/huggingface/safetensors) is 8
bytes with the length of a header, the header in JSON, and the tensors' elements in one buffer without holes.  A file
that deviates is refused.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator, Mapping
from typing import TypedDict

import torch

from fusion.lowering.errors import ArtifactError
from fusion.runtime.memory import empty_large

ALIGNED = 64
"""Bytes to which the buffer is aligned in the file, and each tensor in memory."""

_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}


class _Entry(TypedDict):
    """A tensor in the header of a file; its offsets, of the first byte and of the end, are those in the buffer."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file that holds `tensors`, in order.

    Raises:
        ArtifactError: a dtype has no form in the format.
    """
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    header: dict[str, _Entry] = {}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ArtifactError(f"{name}: tensors of {tensor.dtype} are not saved")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.nbytes:
            yield bytes_of(tensor.cpu().contiguous())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on a CPU, which the result keeps alive."""
    view = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    view.tensor = tensor  # type: ignore[attr-defined]  # objects of ctypes take attributes
    return memoryview(view).cast("B")


def buffer_of(size: int) -> torch.Tensor:
    """Return uninitialised memory of `size` bytes, as a tensor of bytes that begins at a multiple of `ALIGNED`.

    Much memory is in huge pages, which a program that uses each weight once is faster to read
    (measured: docs/performance.md, `weights`).
    """
    room = empty_large((size + ALIGNED,), (1,), torch.uint8)
    start = -room.data_ptr() % ALIGNED
    return room[start : start + size]


def tensors_in(file: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors in a file that was read into memory; they share that memory where it is aligned for them.

    Args:
        file: its bytes.

    Raises:
        ArtifactError: it is not of the format.
    """
    try:
        start, header = _header(file)
        spans = [(*_span(entry), name) for name, entry in header.items()]
        ends = [0, *(end for _, end, _ in sorted(spans))]
        if [begin for begin, _, _ in sorted(spans)] != ends[:-1] or start + ends[-1] != len(file):
            raise ValueError("its tensors do not fill it")
        data = file[start:]
        return {name: _tensor(data[begin:end], header[name]) for begin, end, name in spans}
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"the weights are not in the safetensors format: {error}") from error


def _header(file: torch.Tensor) -> tuple[int, dict[str, _Entry]]:
    memory = bytes_of(file)
    length = int.from_bytes(memory[:8], "little")
    if len(memory) < 8 or length > len(memory) - 8:
        raise ValueError("it is too short")
    header: dict[str, _Entry] = json.loads(bytes(memory[8 : 8 + length]))
    header.pop("__metadata__", None)
    return 8 + length, header


def _span(entry: _Entry) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    whole = all(isinstance(number, int) and number >= 0 for number in (begin, end, *shape))
    if not whole or end - begin != math.prod(shape) * _DTYPES[entry["dtype"]].itemsize:
        raise ValueError("a tensor has other bytes than its shape says")
    return begin, end


def _tensor(data: torch.Tensor, entry: _Entry) -> torch.Tensor:
    dtype = _DTYPES[entry["dtype"]]
    if data.data_ptr() % ALIGNED:
        data = data.clone()
    return (
        data.view(dtype).view(entry["shape"]) if len(data) else torch.empty(entry["shape"], dtype=dtype, device="cpu")
    )


__all__ = ["buffer_of", "bytes_of", "pieces", "tensors_in"]
