"""Writes the sizes of a program as text over the sizes that its inputs have.

Input: expressions over size symbols, in lowering's form; output: text in Python's form, which a target writes in its
own language.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
from torch.utils._sympy import functions as torch_sympy

from fusion.artifact.record import expression_text
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.division import FloorDiv, Mod
from fusion.lowering.ir.sizes import Computed

_THEIRS: tuple[tuple[type, Callable[..., sympy.Basic]], ...] = (
    (FloorDiv, torch_sympy.FloorDiv),
    (Mod, torch_sympy.PythonMod),
)
"""Lowering's functions → PyTorch's."""


def size_text(size: sympy.Expr, names: Sequence[str]) -> str:
    """Return a size as text.

    Args:
        names: the names of the sizes of inputs.

    Raises:
        Unsupported: it depends on data, or has no such text.

    >>> s = sympy.Symbol("s", integer=True, positive=True)
    >>> size_text(4 * FloorDiv(s + 1, 8) + Mod(s, 3), ["s"])
    '4*((1 + s) // 8) + (s % 3)'
    """
    expanded = _expanded(size)
    if unknown := sorted(str(symbol) for symbol in expanded.free_symbols if str(symbol) not in names):
        raise Unsupported(f"a program with sizes that depend on data, such as {unknown[0]}, is not exported")
    return expression_text(expanded, names)


def _expanded(size: sympy.Basic) -> sympy.Basic:
    """Return a size in the terms of PyTorch alone."""
    if isinstance(size, Computed):
        return _expanded(size.meaning)
    if not size.args:
        return size
    args = [_expanded(arg) for arg in size.args]
    kind = next((theirs for ours, theirs in _THEIRS if isinstance(size, ours)), size.func)
    result: sympy.Basic = kind(*args)
    return result


__all__ = ["size_text"]
