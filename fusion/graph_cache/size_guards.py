"""Evaluates AOTAutograd's guards on sizes, which are text, without Python's `eval`.

Input: a text such as `L['t0'] <= 8 and L['t0'] % 2 == 0`, and the sizes that it calls t0, t1, …; output: whether it
holds.  Symbolic sizes are guarded by being compared.  `runtime/size_text.py` defines the texts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import torch

from fusion.graph_cache.serialise import Unwritten
from fusion.runtime.size_text import Evaluated, evaluated

_SIZE = re.compile(r"L\['t(\d+)'\]")


def parsed(text: str) -> Evaluated:
    """Parse a guard.

    Raises:
        Unwritten: a part of it is not known.

    >>> holds(parsed("2 <= L['t0'] and L['t0'] * L['t1'] % 4 == 0"), [6, 2])
    True
    """
    try:
        return evaluated(text, _place)
    except ValueError as error:
        raise Unwritten(f"a guard with {error}") from error


def holds(guard: Evaluated, sizes: Sequence[int | torch.SymInt]) -> bool:
    """Return whether a guard that was parsed holds for `sizes`."""
    return bool(guard(sizes))


def _place(node: ast.expr) -> int | None:
    known = _SIZE.fullmatch(ast.unparse(node)) if isinstance(node, ast.Subscript) else None
    return None if known is None else int(known[1])


__all__ = ["holds", "parsed"]
