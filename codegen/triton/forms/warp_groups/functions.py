"""Writes the body of a loop as a separate function, so that Triton reads it once.

Triton reads the body of a loop twice, first to determine the loop-carried values: the body of three nested loops is
read eight times.  A function is read once for all calls with arguments of the same types, and then inlined at each
call, so that the compiled code stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.codegen.triton.expressions.code import Code, compose, listed, names_in
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import INDENT, function_of
from fusion.codegen.triton.forms.warp_groups.groups import in_gluon


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a program: the suffix of its name, its parameters, its lines without indentation.

    Attributes:
        constants: the parameters that are constants, and perhaps other names.
    """

    suffix: str
    takes: Sequence[str]
    lines: Sequence[Code]
    constants: Sequence[str]

    def text(self, kernel: str) -> Code:
        """Return its source, as a function of the kernel of this name."""
        typed = (f"{each}: tl.constexpr" if each in self.constants else each for each in self.takes)
        head = [f"def {kernel}_{self.suffix}(", *(f"{INDENT}{each}," for each in typed), "):"]
        return function_of(head, in_gluon(self.lines), "gluon.jit")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the body of the current loop: the lines before it, and the names allocated before it."""

    lines: int
    names: int

    @classmethod
    def here(cls, values: Values) -> Mark:
        """Return the current place."""
        return cls(len(values.scopes[-1].lines), len(values.scopes[-1].names))


def split_off(
    values: Values, begin: Mark, suffix: str, known: Sequence[str], constants: Sequence[str], carried: Sequence[str]
) -> Function:
    """Move the lines of the current loop from `begin` on into a function, and return it.

    Args:
        known, constants: the names defined around the loop, besides the names that `values` allocated.
        carried: the names that the lines change, which the function returns.
    """
    *outer, scope = values.scopes
    body = [*scope.lines[begin.lines :], compose("return {}", listed(carried))]
    del scope.lines[begin.lines :]
    allocated = [*(name for each in outer for name in each.names), *scope.names[: begin.names]]
    read = {*names_in(body)}
    takes = [name for name in dict.fromkeys([*known, *constants, *carried, *allocated]) if name in read]
    return Function(suffix, takes, body, constants)
