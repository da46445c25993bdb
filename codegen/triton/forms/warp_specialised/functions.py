"""Functions: the body of a loop as a function of its own.

Triton reads the body of a loop twice, first to find what the loop carries: what stands in three loops it reads eight
times.  A function it reads once for all calls with arguments of the same types, and then puts its body in the place of
each call, so that what is compiled stays the same.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.codegen.triton.expressions.values import Values


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a program: what its name ends in, its parameters, its lines without indentation.

    Attributes:
        constants: the parameters that are constants, and perhaps other names.
    """

    suffix: str
    takes: Sequence[str]
    lines: Sequence[str]
    constants: Sequence[str]


def split_off(
    values: Values, begin: int, suffix: str, known: Sequence[str], constants: Sequence[str], carried: Sequence[str]
) -> Function:
    """What the current loop does from line `begin` of its body on, which is taken from there.

    Args:
        known, constants: the names that are defined around the loop, beside those that `values` has given.
        carried: those that the lines change, which the function returns.
    """
    lines = values.scopes[-1].lines
    body = [*lines[begin:], f"return {', '.join(carried)}"]
    del lines[begin:]
    given = [*known, *constants, *carried, *(name for scope in values.scopes for name in scope.names)]
    inside = names_in(body, ast.Store) - {*carried}
    read = names_in(body, ast.Load) - inside
    return Function(suffix, [name for name in dict.fromkeys(given) if name in read], body, constants)


def names_in(lines: Sequence[str], context: type[ast.expr_context]) -> set[str]:
    """The names that lines read or define.

    >>> names_in(["a = b + c.d  # e", "for f in a: g(f)"], ast.Load) == {"a", "b", "c", "f", "g"}
    True
    """
    text = "\n".join(["def body():", *(f"    {line}" for line in lines)])
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, context)}
