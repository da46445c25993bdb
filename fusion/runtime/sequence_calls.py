"""Calls launches of kernels on a CPU as one function: what `sequences` plans, in this process or a later one.

Input: launches in a row, and for each of their tensors its position among the arguments of the call, or its place in
one of these or in a workspace; output: a callable.  Where a check fails, the tensors of its launch are made for the
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, cast

import torch

from fusion.codegen.c.calls import Entry
from fusion.codegen.c.sequence import Address, InSequence, in_argument, in_workspace, launched_in_sequence
from fusion.runtime.memory import allocator

_empty = cast("Callable[..., torch.Tensor]", allocator(torch.device("cpu"), None))


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """A launch of a function in C, and what raises the error of its result and its tensors."""

    entry: Entry
    fail: Callable[[int, Sequence[torch.Tensor]], NoReturn]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that begins at a byte of the workspace, or of the argument at position `of`, which has its dtype."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    of: int | None = None

    @property
    def address(self) -> Address:
        """Where it begins, for the call in C."""
        return in_workspace(self.begin) if self.of is None else in_argument(self.of, self.begin)

    def tensor(self, arguments: Sequence[torch.Tensor], workspace: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        if self.of is not None:
            whole = arguments[self.of]
            begin = whole.storage_offset() + self.begin // self.dtype.itemsize
            return whole.as_strided(self.shape, self.strides, begin)
        typed = workspace[self.begin :].view(self.dtype)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset())


Places: TypeAlias = "Sequence[Sequence[int | Part]]"
"""For each launch the places of its tensors: a position among the arguments of the call, or a part of the workspace or
of an argument."""


def native_call(
    launches: Sequence[NativeLaunch], places: Places, size: int, function: InSequence | None
) -> Callable[..., None] | None:
    """Return the call of a sequence with a workspace of `size` bytes; None without a `function` that launches it."""
    if function is None:
        return None
    at = [[place.address if isinstance(place, Part) else in_argument(place) for place in of] for of in places]
    launch = launched_in_sequence([each.entry for each in launches], at, function)
    shape = (max(size, 1),)

    def call(*outer: torch.Tensor) -> None:
        workspace = _empty(shape, (1,), torch.uint8)
        if (failed := launch(outer, workspace.data_ptr())) is not None:
            number, result = failed
            launches[number].fail(result, _tensors(places[number], outer, workspace))

    return call


def call_of(launches: Sequence[Callable[..., object]], places: Places, size: int) -> Callable[..., None]:
    """Return the call of a sequence, launch by launch."""
    shape = (max(size, 1),)

    def call(*outer: torch.Tensor) -> None:
        workspace = _empty(shape, (1,), torch.uint8)
        for launch, of in zip(launches, places, strict=True):
            launch(*_tensors(of, outer, workspace))

    return call


def _tensors(
    places: Sequence[int | Part], outer: Sequence[torch.Tensor], workspace: torch.Tensor
) -> list[torch.Tensor]:
    return [place.tensor(outer, workspace) if isinstance(place, Part) else outer[place] for place in places]


__all__ = ["NativeLaunch", "Part", "Places", "call_of", "native_call"]
