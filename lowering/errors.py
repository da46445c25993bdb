"""The family of errors the compiler raises, and where in the user's program they belong.

Every failure a user can meet is a `FusionError`.  It carries a hint and, where one is known, the line of the
user's own program, because that is the only line the user can change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: the fx node, the module it ran in and the line the user wrote.

    >>> str(Origin("relu_1", "encoder.layers.0.mlp", "model.py:42"))
    'relu_1 (encoder.layers.0.mlp, model.py:42)'
    """

    name: str
    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.module, self.line) if part)
        return f"{self.name} ({place})" if place else self.name


class FusionError(Exception):
    """Base of all errors of the compiler.

    Args:
        message: what is wrong, in one sentence.
        hint: what the user can do about it.
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
    """An operation that has no rule for these arguments; it is called as it is (an extern)."""


class VerifyError(FusionError):
    """A Program or a Kernel breaks an invariant of its IR: a defect of the compiler, never of the user."""


class CheckFailed(FusionError, RuntimeError):
    """What a tensor holds is not what an operation takes: found at a launch."""


class IndexOutOfRange(CheckFailed, IndexError):
    """A tensor of positions holds one outside of what it is a position in; eager raises one or the other."""


class DivisionByZero(CheckFailed):
    """An integer is divided by zero."""


class BuildError(FusionError):
    """A generated kernel could not be compiled, or no compiler is present."""
