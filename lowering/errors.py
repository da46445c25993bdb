"""Defines the errors that the compiler raises, with the place in the user's program that they belong to.

Every failure a user can meet is a `FusionError`.  It carries a hint and, where one is known, the line of the
user's own program, because that is the only line the user can change.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

WIDEST = 100
"""Largest number of characters in a line of origins."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Names the origin of a node: the fx node, the module it ran in and the line the user wrote, in the file at `path`.

    >>> str(Origin("relu_1", "encoder.layers.0.mlp", "model.py:42"))
    'relu_1 (encoder.layers.0.mlp, model.py:42)'
    """

    name: str
    module: str = ""
    line: str = ""
    path: str = field(default="", compare=False, repr=False)

    @property
    def place(self) -> str:
        """The module and the line, where known."""
        return ", ".join(part for part in (self.module, self.line) if part)

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


def brief(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty.

    >>> brief(ValueError("no such size\\nsizes are: …")), brief(MemoryError())
    ('no such size', 'MemoryError')
    """
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def by_place(origins: Iterable[Origin]) -> tuple[str, ...]:
    """Return lines of text, one per place in the program, with the consecutive operations that come from there.

    >>> by_place([Origin("amax", "", "a.py:3"), Origin("sub", "", "a.py:3"), Origin("exp", "", "a.py:4"), Origin("x")])
    ('amax, sub (a.py:3)', 'exp (a.py:4)', 'x')
    """
    lines: list[str] = []
    for place, group in itertools.groupby(origins, lambda origin: origin.place):
        names = ", ".join(origin.name for origin in group)
        text = f"{names} ({place})" if place else names
        lines += textwrap.wrap(text, WIDEST, break_long_words=False, break_on_hyphens=False)
    return tuple(lines)


class FusionError(Exception):
    """Base of all errors of the compiler.

    Args:
        message: the problem, in one sentence.
        hint: the remedy for the user.
        origin: the place in the user's program, if known.
    """

    def __init__(self, message: str, *, hint: str = "", origin: Origin | None = None) -> None:
        self.message, self.hint, self.origin = message, hint, origin
        text = message
        if origin is not None:
            text += f"\n  at: {origin}"
        if hint:
            text += f"\n  hint: {hint}"
        super().__init__(text)


class Unsupported(FusionError):
    """An operation without a rule for these arguments; it stays a library call (an extern)."""


class VerifyError(FusionError):
    """A Program or a Kernel breaks an invariant of its IR: a defect of the compiler, never of the user."""


class ArtifactError(FusionError):
    """A file with a compiled program is damaged, is for another machine, or refuses the arguments of a call."""


class FusionWarning(UserWarning):
    """Warns that a region of the program runs eagerly because it could not be compiled, that a dump cannot be written,
    that an edited kernel is not used, or that an artifact does not fit the machine.

    There is one warning for each cause and process.  It points at the line of the program with the call.
    """


class CheckFailed(FusionError):
    """Data in a tensor that an operation does not accept, detected by a launch; also an error of eager's type."""


class IndexOutOfRange(CheckFailed):
    """A tensor of indices holds one out of range."""


class SubscriptOutOfRange(IndexOutOfRange, IndexError):
    """An index out of range in an operation for which eager raises `IndexError`, such as `x[i]` or `F.embedding`."""


class ElementOutOfRange(IndexOutOfRange, RuntimeError):
    """An index out of range in an operation for which eager raises `RuntimeError`, such as `gather` or `scatter`."""


class EitherOutOfRange(SubscriptOutOfRange, ElementOutOfRange):
    """An index out of range in a kernel too large to find out which of its operations has refused it."""


class DataRefused(CheckFailed, RuntimeError):
    """Data do not fulfil a condition of the operation, such as a probability above 1; eager raises `RuntimeError`."""


class DivisionByZero(CheckFailed, RuntimeError):
    """An integer is divided by zero; eager raises `RuntimeError`."""


class OutOfMemory(FusionError, MemoryError):
    """A launch on a CPU gets no memory for its scratch arrays; eager raises `RuntimeError` where it gets none."""


class BuildError(FusionError):
    """A generated kernel could not be compiled, or no compiler is present."""
