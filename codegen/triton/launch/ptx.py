"""Evaluates the inline PTX of generated kernels on numpy arrays, for Triton's interpreter.

Input: the text of an `inline_asm_elementwise` and its operands; output: its result.  Registers hold 32 bits: as many
elements of an operand as fit share one, in their order.  Supported are the operations that `prelude` uses; any other
one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

Register: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"

_FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16}


def run(text: str, operands: Sequence[Any], itemsize: int, pack: int) -> Any:
    """Return the first result of an assembly whose results have elements of `itemsize` bytes, as the bytes of a flat
    array.

    Args:
        text: instructions over `$0`, `$1`, …: the registers of the results, then of the operands.
        operands: flat arrays of equal length.
        pack: elements of each operand that one run of the instructions processes.

    Raises:
        NotImplementedError: the text holds an operation that is not supported.
    """
    results = pack * itemsize // 4
    inputs = [register for operand in operands for register in _registers(operand, pack)]
    known = {f"${results + number}": register for number, register in enumerate(inputs)}
    for line in re.sub(r"^\s*\{|\}\s*$", "", text.strip()).split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            name, rest = line.split(maxsplit=1)
            target, *args = (part.strip() for part in rest.split(","))
            known[target] = _operation(name)(*(_value(arg, known) for arg in args)).astype(np.uint32)
    size = len(inputs[0])
    outputs = [np.broadcast_to(known[f"${number}"], size) for number in range(results)]
    return np.stack(outputs, -1).view(np.uint8).reshape(-1)


def _registers(operand: Any, pack: int) -> list[Register]:
    """Return the registers of `pack` neighbouring elements at a time; the end is padded with 0."""
    padded = np.concatenate([operand, np.zeros(-len(operand) % pack, operand.dtype)])
    words = np.ascontiguousarray(padded).view(np.uint8).reshape(len(padded) // pack, -1).view(np.uint32)
    return [words[:, number] for number in range(words.shape[1])]


def _value(text: str, known: dict[str, Register]) -> Register:
    return known[text] if text in known else np.array([int(text, 0)], np.uint32)


def _operation(name: str) -> Callable[..., Register]:
    operation = _OPERATIONS.get(name)
    if operation is None:
        raise NotImplementedError(f"{name} of PTX is not known to the interpreter")
    return operation


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    """Return four bytes, each one of the eight of both operands."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    chosen = [(int(selector[0]) >> (4 * position)) & 7 for position in range(4)]
    result: Register = np.zeros_like(a)
    for position, byte in enumerate(chosen):
        result |= ((both >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * position)
    return result


def _fma(dtype: torch.dtype) -> Callable[..., Register]:
    """Return a · b + c of two 16-bit floats, rounded once: their products, and the sums used here, are exact in
    float64.
    """

    def operation(*args: Register) -> Register:
        a, b, c = (_halves(arg, dtype) for arg in args)
        rounded = (a * b + c).to(dtype).view(torch.int16).numpy()
        return np.ascontiguousarray(rounded).view(np.uint32).reshape(-1)

    return operation


def _halves(register: Register, dtype: torch.dtype) -> torch.Tensor:
    """Return both halves of a register, [registers, 2]."""
    words = np.ascontiguousarray(register).view(np.int16).reshape(-1, 2)
    return torch.from_numpy(words.copy()).view(dtype).double()


_OPERATIONS: dict[str, Callable[..., Register]] = {
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    **{f"fma.rn.{name}x2": _fma(dtype) for name, dtype in _FLOATS.items()},
}
