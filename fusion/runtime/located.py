"""Adds the user's lines to the messages of failed checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

import torch

from fusion.codegen.c.calls import Entry
from fusion.lowering.errors import CheckFailed

Result = TypeVar("Result")


def located(launch: Callable[..., Result], lines: Iterable[str]) -> Callable[..., Result]:
    """Return `launch` with the user's lines added to the message of a failed check."""

    def launched(*args: object) -> Result:
        try:
            return launch(*args)
        except CheckFailed as failed:
            raise _at(failed, lines) from None

    return launched


def failing(entry: Entry, lines: Iterable[str]) -> Callable[[int, Sequence[torch.Tensor]], NoReturn]:
    """Return what raises the error of the result of a function on its tensors, with the user's lines."""

    def fail(result: int, tensors: Sequence[torch.Tensor]) -> NoReturn:
        error = entry.error(result, tensors)
        raise _at(error, lines) if isinstance(error, CheckFailed) else error

    return fail


def _at(failed: CheckFailed, lines: Iterable[str]) -> CheckFailed:
    return type(failed)("\n  at: ".join((failed.message, *lines)))


__all__ = ["failing", "located"]
