"""Functions: the body of a loop as a function of its own.

Triton reads the body of a loop twice, first to determine what the loop carries: the body of three nested loops is read
eight times.  A function is read once for all calls with arguments of the same types, and then inlined at each call, so
that the compiled code stays the same.

Which names the lines read, Python's own parser says.  Lines are written as they are read, with names where they are
used; to list the names again beside every line would state them twice.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.codegen.triton.expressions.values import Values


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a program: the suffix of its name, its parameters, its lines without indentation.

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
    """Move the lines of the current loop from line `begin` of its body on into a function, and return it.

    Args:
        known, constants: the names defined around the loop, besides those that `values` allocated.
        carried: the names that the lines change, which the function returns.
    """
    lines = values.scopes[-1].lines
    body = [*lines[begin:], f"return {', '.join(carried)}"]
    del lines[begin:]
    outer_names = [*known, *constants, *carried, *(name for scope in values.scopes for name in scope.names)]
    inside = names_in(body, ast.Store) - {*carried}
    read = names_in(body, ast.Load) - inside
    return Function(suffix, [name for name in dict.fromkeys(outer_names) if name in read], body, constants)


def names_in(lines: Sequence[str], context: type[ast.expr_context]) -> set[str]:
    """Return the names that lines read or define.

    >>> names_in(["a = b + c.d  # e", "for f in a: g(f)"], ast.Load) == {"a", "b", "c", "f", "g"}
    True
    """
    text = "\n".join(["def body():", *(f"    {line}" for line in lines)])
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, context)}
