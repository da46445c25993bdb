"""Expresses dimensions, strides and size arguments over size symbols.

Input: an int or a `SymInt` of PyTorch; output: a sympy expression of sums, products, powers, `//` and `%` of integers
and symbols, the same for sizes that a guard holds equal.  Other expressions of sizes (a maximum, a rounded quotient)
become separate symbols, `Computed`, with their meaning: the host evaluates it before a launch, and nothing else has to
know how.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.printers import PythonPrinter

from fusion.lowering.errors import VerifyError
from fusion.lowering.ir.division import ONE, FloorDiv, Mod

DEFAULT_SIZE = 256
"""The assumed value of an unknown symbolic size when costs are estimated."""


class Computed(sympy.Symbol):
    """A size that the host computes from other ones.  Two with the same meaning are equal.

    Attributes:
        meaning: its value, as PyTorch's expression over `given`.
        given: the size symbols it is computed from.
    """

    __slots__ = ("given", "meaning")
    meaning: sympy.Basic
    given: tuple[sympy.Symbol, ...]

    def __new__(cls, meaning: sympy.Basic) -> Computed:
        text = str(meaning)
        words = re.sub(r"\W+", "_", text).strip("_")[:24]
        known = {fact: True for fact in ("positive", "nonnegative") if getattr(meaning, f"is_{fact}", False)}
        symbol = super().__new__(cls, f"n_{words}_{zlib.crc32(text.encode()):08x}", integer=True, **known)
        symbol.meaning = meaning
        symbol.given = tuple(sorted(meaning.free_symbols, key=str))
        return symbol

    def __getnewargs_ex__(self) -> tuple[tuple[sympy.Basic], dict[str, object]]:
        return (self.meaning,), {}


def size_of(size: int | torch.SymInt | torch.SymFloat) -> sympy.Expr:
    """Return a dimension, stride, size argument, or number computed from sizes, as an expression over size symbols."""
    if isinstance(size, int):
        return sympy.Integer(size)
    expr: sympy.Expr = size.node.expr
    if expr.is_Symbol or expr.is_Integer:
        return expr
    expr = _in_one_form(expr, _equal_forms(size.node.shape_env))
    return _translated_within(expr) if isinstance(size, torch.SymFloat) else _translated(expr)


@dataclass(slots=True)
class _Forms:
    """Canonical forms of equal sizes, size → form, from the first `seen` guards, preferring the symbols `preferred`."""

    preferred: frozenset[sympy.Symbol] = frozenset()
    seen: int = 0
    forms: dict[sympy.Expr, sympy.Expr] = field(default_factory=dict)


_FORMS: WeakKeyDictionary[ShapeEnv, _Forms] = WeakKeyDictionary()


def write_over(sizes: Iterable[int | torch.SymInt]) -> None:
    """Express, from now on, sizes that a guard holds equal by the symbols among `sizes`, the inputs of a graph."""
    symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
    preferred = frozenset(size.node.expr for size in symbolic if size.node.expr.is_Symbol)
    for known in {size.node.shape_env for size in symbolic}:
        if known not in _FORMS or _FORMS[known].preferred != preferred:
            _FORMS[known] = _Forms(preferred)


def _equal_forms(known: ShapeEnv) -> dict[sympy.Expr, sympy.Expr]:
    """Return size → canonical form, by the guards: rows counted in two ways are the same rows."""
    entry = _FORMS.setdefault(known, _Forms())
    for guard in known.guards[entry.seen :]:
        if isinstance(guard.expr, sympy.Eq):
            sides = map(known.replace, guard.expr.args)
            first, second = sorted(sides, key=lambda e: (not e.free_symbols <= entry.preferred, e.count_ops(), str(e)))
            if first == 0 and isinstance(second, (torch_sympy.Mod, torch_sympy.PythonMod)):
                whole, divisor = second.args
                first, second = whole, divisor * torch_sympy.FloorDiv(whole, divisor)
            if not second.is_Number and not second.is_Symbol:
                entry.forms[second] = first
    entry.seen = len(known.guards)
    return entry.forms


def _in_one_form(expr: sympy.Expr, forms: Mapping[sympy.Expr, sympy.Expr]) -> sympy.Expr:
    for second, first in forms.items():
        if expr == second:
            expr = first
        elif second.is_Mul and expr.is_Mul and set(second.args) <= set(expr.args):
            expr = expr / second * first
        elif not (second.is_Mul or second.is_Add):
            expr = expr.xreplace({second: first})
    return expr


def truth_of(condition: torch.SymBool) -> sympy.Expr:
    """Return a condition on sizes as a number, 1 or 0."""
    expr = condition.node.expr
    return sympy.Integer(bool(expr)) if expr in (sympy.true, sympy.false) else Computed(expr)


def is_condition(number: sympy.Expr) -> bool:
    """Return whether a number stands for a condition on sizes.

    >>> s = sympy.Symbol("s", positive=True, integer=True)
    >>> is_condition(Computed(s > 3)), is_condition(Computed(torch_sympy.Max(3, s)))
    (True, False)
    """
    return isinstance(number, Computed) and isinstance(number.meaning, (sympy.Rel, sympy.logic.boolalg.BooleanFunction))


def sizes_of(sizes: Sequence[int | torch.SymInt]) -> tuple[sympy.Expr, ...]:
    """Apply `size_of` to each."""
    return tuple(size_of(size) for size in sizes)


def may_be_empty(size: sympy.Expr) -> bool:
    """Return whether a dimension of this size may be empty; backed symbolic sizes are at least 2.

    >>> s, u = sympy.Symbol("s", positive=True, integer=True), sympy.Symbol("u", integer=True)
    >>> may_be_empty(s - 1), may_be_empty(u), may_be_empty(Computed(torch_sympy.Max(1, u)) - 1)
    (False, True, True)
    """
    known = [(symbol, ONE if isinstance(symbol, Computed) else 2 * ONE) for symbol in size.free_symbols]
    least = {s: sympy.Dummy(nonnegative=True, integer=True) + start for s, start in known if s.is_positive}
    return not size.subs(least).is_positive


@lru_cache(maxsize=1 << 12)
def _translated(expr: sympy.Expr) -> sympy.Expr:
    if expr.is_Symbol or expr.is_Rational:
        return expr
    if expr.is_Add or expr.is_Mul:
        return expr.func(*map(_translated, expr.args))
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return _translated(expr.base) ** expr.exp
    if isinstance(expr, (torch_sympy.FloorDiv, torch_sympy.Mod, torch_sympy.PythonMod)):
        whole, divisor = map(_translated, expr.args)
        if not may_be_empty(divisor):  # an integer that the caller passes may be negative, as Python's divisor
            return FloorDiv(whole, divisor) if isinstance(expr, torch_sympy.FloorDiv) else Mod(whole, divisor)
    return Computed(expr)


def _translated_within(number: sympy.Expr) -> sympy.Expr:
    """Translate the sizes within a real number."""
    if number.is_integer and not number.is_Number:
        return _translated(number)
    return number if number.is_Atom else number.func(*map(_translated_within, number.args))


def given_by(size: sympy.Expr) -> frozenset[sympy.Symbol]:
    """Return the symbols that a size is computed from.

    >>> s = sympy.Symbol("s", integer=True, positive=True)
    >>> given_by(2 * Computed(torch_sympy.Max(1, torch_sympy.FloorDiv(s, 4))))
    frozenset({s})
    """
    symbols: set[sympy.Symbol] = set()
    for symbol in size.free_symbols:
        symbols.update(symbol.given if isinstance(symbol, Computed) else (symbol,))
    return frozenset(symbols)


@lru_cache(maxsize=1 << 12)
def calculation(size: Computed) -> Callable[..., int]:
    """Return the function that computes a size from `size.given`.

    >>> s = sympy.Symbol("s", integer=True, positive=True)
    >>> calculation(Computed(torch_sympy.Max(1, torch_sympy.FloorDiv(s, 4))))(3)
    1
    """
    names = {symbol: sympy.Symbol(f"x{k}", integer=True) for k, symbol in enumerate(size.given)}
    text = PythonPrinter().doprint(size.meaning.xreplace(names))
    function = eval(f"lambda {', '.join(map(str, names.values()))}: int({text})", {"math": math, "torch": torch})
    return cast("Callable[..., int]", function)


def where_there_are_elements(stride: sympy.Expr) -> sympy.Expr:
    """Simplify a stride under the assumption that elements exist: PyTorch's max(1, n), for n inner elements, is n.

    >>> s = sympy.Symbol("s", integer=True, positive=True)
    >>> where_there_are_elements(2 * Computed(torch_sympy.Max(1, torch_sympy.FloorDiv(s, 4))))
    2*(s//4)
    """
    stride = sympy.sympify(stride)
    atoms = [symbol for symbol in stride.free_symbols if isinstance(symbol, Computed)]
    inner = {atom: _inside(atom.meaning) for atom in atoms}
    return stride.xreplace(inner) if inner else stride


def _inside(meaning: sympy.Basic) -> sympy.Expr:
    if isinstance(meaning, torch_sympy.Max) and len(meaning.args) == 2 and ONE in meaning.args:
        (inner,) = (arg for arg in meaning.args if arg != ONE)
        return _translated(inner)
    return Computed(meaning)


def estimate(size: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> int:
    """Evaluate `size`, with symbolic sizes at their hints or at a default.

    >>> s = sympy.Symbol("s", integer=True, positive=True)
    >>> estimate(s * s + Computed(torch_sympy.Max(1, s)), {s: 3})
    12
    """
    if size.is_Integer:
        return int(size)
    known = {symbol: hints.get(symbol, DEFAULT_SIZE) for symbol in given_by(size)}
    return int(with_values(size, {**known, **hints}))


def with_values(size: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """Substitute numbers for the symbols of a size, evaluating computed ones."""
    numbers = {symbol: sympy.Integer(values[symbol]) for symbol in size.free_symbols if symbol in values}
    for symbol in size.free_symbols - numbers.keys():
        if isinstance(symbol, Computed) and all(each in values for each in symbol.given):
            numbers[symbol] = sympy.Integer(calculation(symbol)(*(values[each] for each in symbol.given)))
    return size.xreplace(numbers)


def size_value(expr: sympy.Expr, sizes: Mapping[sympy.Symbol, int]) -> int:
    """Evaluate a size expression as an integer.

    Raises:
        VerifyError: it holds a symbol that has no value.
    """
    value = expr if expr.is_Integer else with_values(expr, sizes)
    if not value.is_Integer:
        raise VerifyError(f"no value for the symbols of {value}")
    return int(value)


def hint_of(size: int | torch.SymInt) -> int:
    """Return a size as it was when the graph was traced, without a guard, which comparing the size would add.

    Data-dependent sizes have a default.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return hint if isinstance(hint, int) else estimate(size_of(size), {})


def elements(shape: Iterable[int | torch.SymInt]) -> int:
    """Return the number of elements of a tensor when the graph was traced."""
    return math.prod(map(hint_of, shape))
