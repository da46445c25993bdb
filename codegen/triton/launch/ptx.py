"""PTX: the assembly of generated kernels on numpy arrays, as Triton's interpreter needs it.

What enters is the text of an `inline_asm_elementwise` and its operands; what leaves are the tiles it gives.  Registers
hold 32 bits: as many elements of an operand as fit one share it, in their order.  Understood are the operations that
`prelude` uses; any other one is refused.
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
    """The first result of an assembly whose results have elements of `itemsize` bytes, as the bytes of a flat array.

    Args:
        text: instructions over `$0`, `$1`, …: the registers of the results, then those of the operands.
        operands: flat arrays of equal length.
        pack: elements of each operand that one run of the instructions takes.

    Raises:
        NotImplementedError: the text holds an operation that is not known here.
    """
    results = pack * itemsize // 4
    given = [register for operand in operands for register in _registers(operand, pack)]
    known = {f"${results + number}": register for number, register in enumerate(given)}
    for line in re.sub(r"^\s*\{|\}\s*$", "", text.strip()).split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            name, rest = line.split(maxsplit=1)
            target, *args = (part.strip() for part in rest.split(","))
            known[target] = _operation(name)(*(_value(arg, known) for arg in args)).astype(np.uint32)
    size = len(given[0])
    found = [np.broadcast_to(known[f"${number}"], size) for number in range(results)]
    return np.stack(found, -1).view(np.uint8).reshape(-1)


def _registers(operand: Any, pack: int) -> list[Register]:
    """The registers of so many neighbouring elements at a time; what is missing at the end is 0."""
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
    """Four bytes, each one of the eight of both operands."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    chosen = [(int(selector[0]) >> (4 * position)) & 7 for position in range(4)]
    found: Register = np.zeros_like(a)
    for position, byte in enumerate(chosen):
        found |= ((both >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * position)
    return found


def _fma(dtype: torch.dtype) -> Callable[..., Register]:
    """a · b + c of two halves, rounded once: a product of halves is exact in float64, and so are the sums used here."""

    def operation(*args: Register) -> Register:
        a, b, c = (_halves(arg, dtype) for arg in args)
        rounded = (a * b + c).to(dtype).view(torch.int16).numpy()
        return np.ascontiguousarray(rounded).view(np.uint32).reshape(-1)

    return operation


def _halves(register: Register, dtype: torch.dtype) -> torch.Tensor:
    """Both halves of a register, [registers, 2]."""
    words = np.ascontiguousarray(register).view(np.int16).reshape(-1, 2)
    return torch.from_numpy(words.copy()).view(dtype).double()


_OPERATIONS: dict[str, Callable[..., Register]] = {
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    **{f"fma.rn.{name}x2": _fma(dtype) for name, dtype in _FLOATS.items()},
}
