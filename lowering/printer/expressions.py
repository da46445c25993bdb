"""Prints expressions, indices and constants as text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.expr import Cast, Const, Expr, Index, IndexValue, Load, Op, Random, TileRef, concrete, postorder

SHORT_TEXT = 16
"""Text up to this length is repeated rather than named."""


LONG = 100
"""Text beyond this length is named, so that lines stay readable and text is not repeated."""


DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
"""Names of the usual element types; others are named as in torch."""


INFIX = {  # operation: (sign, precedence)
    "or": ("|", 1),
    "xor": ("^", 2),
    "and": ("&", 3),
    "eq": ("==", 0),
    "ne": ("!=", 0),
    "lt": ("<", 0),
    "le": ("<=", 0),
    "gt": (">", 0),
    "ge": (">=", 0),
    "shl": ("<<", 4),
    "shr": (">>", 4),
    "add": ("+", 5),
    "sub": ("-", 5),
    "mul": ("*", 6),
    "truediv": ("/", 6),
    "floordiv": ("//", 6),
    "remainder": ("%", 6),
}


_UNARY, _POWER, _ATOM = 7, 8, 9


def format_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's short name: `f32`, `bf16`, `i64`, …"""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


@lru_cache(maxsize=1 << 16)
def format_index(index: sympy.Expr) -> str:
    """Format an index expression, terms with the largest coefficient first.

    >>> i, r = sympy.symbols("i0 r0", integer=True)
    >>> format_index(r + 781 * i), format_index(3 * FloorDiv(i + 1, 4) - 2), format_index(Mod(7 * i, 8))
    ('781*i0 + r0', '3*((i0 + 1)//4) - 2', '(7*i0)%8')
    """
    if index.is_Add:
        terms = sorted(index.args, key=_term_order)
        text = format_index(terms[0])
        for term in terms[1:]:
            negative = bool(term.as_coeff_Mul()[0] < 0)
            text += f" - {format_index(-term)}" if negative else f" + {format_index(term)}"
        return text
    if index.is_Mul:
        number, rest = index.as_coeff_Mul()
        factors = sorted((_inside(factor, "+/%") for factor in sympy.Mul.make_args(rest)), key=lambda t: (len(t), t))
        sign = "-" if number < 0 else ""
        return sign + "*".join([*([str(abs(number))] if abs(number) != 1 else []), *factors])
    if isinstance(index, (FloorDiv, Mod)):
        return ("//" if isinstance(index, FloorDiv) else "%").join(_inside(arg, "+*/%") for arg in index.args)
    return str(index)


def _term_order(term: sympy.Expr) -> tuple[bool, bool, sympy.Expr, int, str]:
    """Sort positive terms before negative ones, numbers after symbols, then by decreasing stride."""
    number, rest = term.as_coeff_Mul()
    return bool(number < 0), bool(rest == 1), -abs(number), -len(sympy.Mul.make_args(rest)), str(rest)


def _inside(arg: sympy.Expr, weaker: str) -> str:
    """Format `arg` as an operand, in parentheses where its own operator is one of `weaker`."""
    own = "+" if arg.is_Add else "*" if arg.is_Mul else "/" if isinstance(arg, (FloorDiv, Mod)) else ""
    text = format_index(arg)
    return f"({text})" if (own and own in weaker) or text.startswith("-") else text


def sizes_text(sizes: Iterable[sympy.Expr]) -> str:
    """Format sizes: `4, s0, 2*s0 + 1`."""
    return ", ".join(format_index(size) for size in sizes)


class ExpressionPrinter:
    """Formats expressions with shared and long parts named; `lines` holds definitions that are not printed yet."""

    def __init__(self, roots: Iterable[Expr]) -> None:
        self.users: dict[Expr, int] = {}
        for node in postorder(*(roots := list(roots))):
            for child in node.children():
                self.users[child] = self.users.get(child, 0) + 1
        for root in roots:
            self.users[root] = self.users.get(root, 0) + 1
        self.texts: dict[Expr, tuple[str, int]] = {}  # (text, precedence)
        self.lines: list[str] = []
        self.count = 0

    def text(self, root: Expr) -> str:
        """Return the text of `root`, its shared parts by name."""
        if root not in self.texts:
            for node in postorder(root):
                if node not in self.texts:
                    self.texts[node] = self._named(node, *self._compose(node), last=node is root)
        return self.texts[root][0]

    def _named(self, node: Expr, text: str, precedence: int, last: bool) -> tuple[str, int]:
        shared = self.users.get(node, 0) > 1 and len(text) > SHORT_TEXT
        if isinstance(node, (Const, TileRef)) or not (shared or (len(text) > LONG and not last)):
            return text, precedence
        self.count += 1
        self.lines.append(f"%{self.count} = {text}")
        return f"%{self.count}", _ATOM

    def _operand(self, node: Expr, above: int) -> str:
        """Return a child's text, in parentheses if it binds less tightly than `above`."""
        text, precedence = self.texts[node]
        return text if precedence >= above else f"({text})"

    def _compose(self, node: Expr) -> tuple[str, int]:
        match concrete(node):
            case Load(buffer, index, _, mask):
                condition = "" if mask is None else f" if {self._operand(mask, 0)}"
                return f"{buffer}[{', '.join(map(self.index, index))}{condition}]", _ATOM
            case Const() as constant:
                text = format_const(constant)
                return text, _UNARY if text.startswith("-") else _ATOM
            case IndexValue(place, dtype):
                suffix = "" if dtype is torch.int64 else f"_{format_dtype(dtype)}"
                return f"index{suffix}({format_index(place)})", _ATOM
            case Cast(arg, dtype, implicit):
                return f"{'~' if implicit else ''}{format_dtype(dtype)}({self._operand(arg, 0)})", _ATOM
            case Random(kind, seed, offset):
                return f"{kind}({self._operand(seed, 0)}, {format_index(offset)})", _ATOM
            case TileRef(name, _, before):
                return f"{name}'" if before else name, _ATOM
            case Op() as op:
                return self._compose_op(op)
            case unknown:
                assert_never(unknown)

    def _compose_op(self, node: Op) -> tuple[str, int]:
        if node.name in INFIX and len(node.args) == 2:
            sign, level = INFIX[node.name]
            left, right = self._operand(node.args[0], level or 1), self._operand(node.args[1], level + 1)
            return f"{left} {sign} {right}", level
        if node.name == "neg":
            number = isinstance(node.args[0], Const)  # -(1.0) is not the constant -1.0
            return f"-{self._operand(node.args[0], _ATOM + 1 if number else _POWER)}", _UNARY
        if node.name == "pow":
            base, exponent = (self._operand(arg, _ATOM) for arg in node.args)
            return f"{base}**{exponent}", _POWER
        return f"{node.name}({', '.join(self._operand(arg, 0) for arg in node.args)})", _ATOM

    def index(self, index: Index) -> str:
        """Format one index of a load or store, an index expression or a loaded value."""
        return self._operand(index, 0) if isinstance(index, Expr) else format_index(index)


def format_const(node: Const) -> str:
    """Format a constant, with its dtype unless that is the usual one for its kind.

    >>> format_const(Const(-0.0, torch.float32)), format_const(Const(1, torch.int8))
    ('-0.0', '1_i8')
    """
    usual = node.dtype in (torch.float32, torch.int64, torch.bool)
    text = str(node.value).lower() if isinstance(node.value, bool) else repr(node.value)
    return text if usual else f"{text}_{format_dtype(node.dtype)}"


def format_expr(expr: Expr) -> str:
    """Format one expression; definitions of named parts come first, a line each.

    >>> f32 = torch.float32
    >>> x = Load("x", (sympy.Symbol("i0"),), f32)
    >>> half = Op("mul", (Const(0.5, f32), Op("exp", (Op("add", (x, Const(1.0, f32)), f32),), f32)), f32)
    >>> print(format_expr(Op("sub", (Op("mul", (half, x), f32), half), f32)))
    %1 = 0.5 * exp(x[i0] + 1.0)
    %1 * x[i0] - %1
    """
    names = ExpressionPrinter([expr])
    text = names.text(expr)
    return "\n".join([*names.lines, text])
