"""Gluon programs that copy rows to shared memory, run on the CPU, one program after the other.

Input: the text of a generated file and the tensors of its launch; output: in these tensors.  A copy arrives only when
it is awaited: shared memory that is read too early is NaN.  A pointer outside its tensor may be read only within the
words that the tensor begins and ends in, and is never written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from fusion.codegen.triton.file import WAIT
from fusion.lowering.ir.kernel import Kernel

WORD = 16
"""Bytes of a word."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """Addresses in a tensor, in elements."""

    flat: torch.Tensor
    at: Any = 0

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.flat, self.at + step)

    def read(self, mask: Any = None) -> torch.Tensor:
        """Read the numbers; where the mask is false, or a word has none of the tensor, anything."""
        at = torch.as_tensor(self.at)
        wanted = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).broadcast_to(at.shape)
        inside, word = (at >= 0) & (at < len(self.flat)), WORD // self.flat.element_size()
        assert bool(((at >= 0) & (at // word <= (len(self.flat) - 1) // word))[wanted].all()), "read out of bounds"
        values = self.flat[at.clamp(0, len(self.flat) - 1)]
        if not values.dtype.is_floating_point:
            return values
        return torch.where(inside & wanted, values, torch.tensor(math.nan, dtype=values.dtype))

    def write(self, values: Any, mask: Any = None) -> None:
        """Write numbers where the mask is true."""
        at = torch.as_tensor(self.at)
        wanted = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).broadcast_to(at.shape)
        at, values = at[wanted], torch.as_tensor(values).broadcast_to(wanted.shape)[wanted]
        assert bool(((at >= 0) & (at < len(self.flat))).all()), "written out of bounds"
        self.flat[at] = values.to(self.flat.dtype)


class Shared:
    """Blocks of shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, number: int) -> Shared:
        return Shared(self.data[int(number)])

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


class _Copies:
    """Copies on their way."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], object]] = []
        self.groups: list[list[Callable[[], object]]] = []

    def begin(self, slot: Shared, pointer: Pointer, mask: Any = None) -> None:
        self.begun.append(lambda: slot.data.copy_(pointer.read(mask)))

    def commit(self) -> None:
        self.groups.append(self.begun)
        self.begun = []

    def wait(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for copy in self.groups.pop(0):
                copy()


def _reduce(x: torch.Tensor, axis: int, combine: Callable[[Any, Any], Any]) -> torch.Tensor:
    parts = list(x.unbind(axis))
    while len(parts) > 1:
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _where(condition: Any, a: Any, b: Any) -> torch.Tensor:
    dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.float32)
    return torch.where(torch.as_tensor(condition), *(torch.as_tensor(x, dtype=dtype) for x in (a, b)))


def _either(pick: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def of(a: Any, b: Any, propagate_nan: object = None) -> torch.Tensor:
        dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.int64)
        return pick(torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype))

    return of


def _language(program: list[int]) -> dict[str, Any]:
    """Return the imports of a generated file, for the program whose number `program` holds."""
    types = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "int32")}
    functions = {name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "rsqrt", "sqrt")}
    copies = _Copies()
    tl = SimpleNamespace(
        **types,
        constexpr=int,
        PropagateNan=SimpleNamespace(ALL=None),
        program_id=lambda axis: program[0],
        load=lambda pointer, mask=None, eviction_policy="": pointer.read(mask),
        store=lambda pointer, value, mask=None, eviction_policy="": pointer.write(value, mask),
        device_assert=lambda condition, message, mask=None: None,
        where=_where,
        cast=lambda x, dtype: torch.tensor(x, dtype=dtype),
        maximum=_either(torch.maximum),
        minimum=_either(torch.minimum),
        div_rn=torch.div,
        sum=lambda x, axis: x.sum(axis),
        reduce=_reduce,
        **functions,
    )
    gl = SimpleNamespace(
        **types,
        BlockedLayout=lambda *parts: None,
        SwizzledSharedLayout=lambda *parts: None,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(shape, math.nan, dtype=dtype)),
        arange=lambda first, end, layout: torch.arange(first, end),
        full=lambda shape, number, dtype, layout: torch.full(shape, number, dtype=dtype),
    )
    asynchronous = SimpleNamespace(
        async_copy_global_to_shared=copies.begin, commit_group=copies.commit, wait_group=copies.wait
    )
    hopper, libdevice = SimpleNamespace(async_copy=asynchronous), SimpleNamespace(**functions)
    return {"tl": tl, "gl": gl, "hopper": hopper, "libdevice": libdevice, WAIT: lambda: None}


def run(kernel: Kernel, source: str, args: Sequence[torch.Tensor], programs: Sequence[int]) -> None:
    """Run some programs of the file's kernel on `args`, contiguous tensors."""
    program = [0]
    decorated = SimpleNamespace(jit=lambda function: function, cdiv=lambda a, b: -(-a // b))
    names: dict[str, Any] = {"triton": decorated, "gluon": decorated, **_language(program)}
    exec("\n".join(line for line in source.splitlines() if not line.startswith(("import ", "from "))), names)
    constants = {name: size for name, size in names["CONFIG"].items() if name.isupper()}
    pointers = [Pointer(arg.view(-1)) for arg in args]
    for number in programs:
        program[0] = number
        names[kernel.name](*pointers, **constants)


__all__ = ["run"]
