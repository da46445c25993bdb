"""Writes arguments of calls as JSON, and reads them.

Input: numbers, text, lists, tuples, dtypes, devices and the like, in which some values are registers; output: values of
JSON.  Reading makes values of listed kinds only; functions are named, and looked up in lists (`functions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fusion.artifact.manifest import Json


@dataclass(frozen=True, slots=True)
class Register:
    """The value of a register."""

    number: int


_CONSTANTS: Mapping[str, object] = {
    str(each): each
    for each in vars(torch).values()
    if isinstance(each, (torch.dtype, torch.layout, torch.memory_format))
}


def written(value: object, register: Callable[[object], int | None]) -> Json:
    """Return `value` as JSON.

    Args:
        register: returns the number of the register that a value stands for; None for other values.

    Raises:
        ValueError: a part of it has no form in JSON.

    >>> written((1, [2.5, "x"], torch.float16), lambda value: 7 if value == "x" else None)
    {'tuple': [1, [{'float': '0x1.4000000000000p+1'}, {'register': 7}], {'torch': 'torch.float16'}]}
    """
    number = register(value)
    if number is not None:
        return {"register": number}
    if value is None or (isinstance(value, (bool, int, str)) and type(value) in (bool, int, str)):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if (isinstance(value, (list, tuple)) and type(value) in (list, tuple, torch.Size)) or _is_fx_list(value):
        parts = [written(part, register) for part in value]  # type: ignore[attr-defined]  # a sequence
        return parts if isinstance(value, list) else {"tuple": parts}
    raise ValueError(f"a {type(value).__name__}")


def _is_fx_list(value: object) -> bool:
    """Return whether a value is an immutable list of torch.fx."""
    return isinstance(value, list) and type(value).__module__.startswith("torch.fx")


def read(value: Json) -> object:
    """Return the value that `written` wrote, with a `Register` for each register.

    Raises:
        ValueError: it is malformed; also KeyError.

    >>> read({"tuple": [1, [{"float": "0x1.4p+1"}, {"register": 7}], {"torch": "torch.float16"}]})
    (1, [2.5, Register(number=7)], torch.float16)
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, list):
        return [read(part) for part in value]
    ((kind, held),) = value.items()
    match kind, held:
        case "register", int(number):
            return Register(number)
        case "float", str(number):
            return float.fromhex(number)
        case "complex", [str(real), str(imaginary)]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "torch", str(name):
            return _CONSTANTS[name]
        case "device", str(name):
            return torch.device(name)
        case "tuple", list(parts):
            return tuple(read(part) for part in parts)
    raise ValueError(f"no value is written as {{{kind!r}: {held!r}}}")


__all__ = ["Register", "read", "written"]
