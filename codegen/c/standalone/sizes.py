"""Writes sizes, and conditions on them, in C.

Input: text in Python's form over names of sizes, as `fusion/runtime/size_text.py` evaluates it; output: an expression
in C of int64_t, of double where Python has a float, or of int for a condition.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from fusion.lowering.errors import Unsupported

_PLAIN: Mapping[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_CALLED: Mapping[type, str] = {ast.FloorDiv: "fusion_floor_div", ast.Mod: "fusion_mod", ast.Pow: "fusion_pow"}
_COMPARED: Mapping[type, str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_ROUNDED = {"math.floor": "floor", "math.ceil": "ceil", "math.trunc": "trunc"}
_EXTREMES = {"max": "fusion_max", "min": "fusion_min"}


@dataclass(frozen=True, slots=True)
class _Code:
    text: str
    is_float: bool = False


def size_code(text: str, names: Mapping[str, str]) -> str:
    """Return an expression in C.

    Args:
        names: size → its name in C.

    Raises:
        Unsupported: a part of it has no form in C.

    >>> size_code("max(1, s0 // 4) * 3", {"s0": "sizes[0]"})
    '(fusion_max(1, fusion_floor_div(sizes[0], 4)) * 3)'
    >>> size_code("2 <= s0 and s0 % 4 == 0", {"s0": "s0"})
    '((2 <= s0) && (fusion_mod(s0, 4) == 0))'
    >>> size_code("math.ceil(s0 / 4)", {"s0": "s0"})
    '(int64_t)ceil(((double)s0 / (double)4))'
    """
    return _code(ast.parse(text, mode="eval").body, names).text


def _code(node: ast.expr, names: Mapping[str, str]) -> _Code:
    match node:
        case ast.Name(id=name) if name in names:
            return _Code(names[name])
        case ast.Constant(value=bool() as flag):
            return _Code(str(int(flag)))
        case ast.Constant(value=int() as number):
            return _Code(str(number) if abs(number) < 1 << 31 else f"INT64_C({number})")
        case ast.UnaryOp(op=op, operand=operand):
            inner = _code(operand, names)
            return _Code(f"({'!' if isinstance(op, ast.Not) else '-'}{inner.text})", inner.is_float)
        case ast.BoolOp(op=op, values=values):
            joint = " && " if isinstance(op, ast.And) else " || "
            return _Code(f"({joint.join(_code(value, names).text for value in values)})")
        case ast.Compare(left=left, ops=ops, comparators=others):
            terms = [_code(each, names).text for each in (left, *others)]
            pairs = zip(terms, ops, terms[1:], strict=False)
            compared = [f"({one} {_COMPARED[type(op)]} {other})" for one, op, other in pairs]
            return _Code(compared[0] if len(compared) == 1 else f"({' && '.join(compared)})")
        case ast.BinOp(left=left, op=op, right=right):
            return _computed(op, _code(left, names), _code(right, names), node)
        case ast.Call(func=function, args=args, keywords=[]):
            return _called(ast.unparse(function), [_code(each, names) for each in args], node)
    raise _refusal(node)


def _computed(op: ast.operator, left: _Code, right: _Code, node: ast.expr) -> _Code:
    is_float = left.is_float or right.is_float
    if isinstance(op, ast.Div):
        return _Code(f"((double){left.text} / (double){right.text})", True)
    if type(op) in _PLAIN:
        return _Code(f"({left.text} {_PLAIN[type(op)]} {right.text})", is_float)
    if type(op) in _CALLED and not is_float:
        return _Code(f"{_CALLED[type(op)]}({left.text}, {right.text})")
    raise _refusal(node)


def _called(name: str, args: list[_Code], node: ast.expr) -> _Code:
    if name in _ROUNDED and len(args) == 1:
        return args[0] if not args[0].is_float else _Code(f"(int64_t){_ROUNDED[name]}({args[0].text})")
    if name == "torch.sym_float" and len(args) == 1:
        return _Code(f"(double){args[0].text}", True)
    if name in _EXTREMES and len(args) > 1 and not any(arg.is_float for arg in args):
        text = args[-1].text
        for arg in reversed(args[:-1]):
            text = f"{_EXTREMES[name]}({arg.text}, {text})"
        return _Code(text)
    raise _refusal(node)


def _refusal(node: ast.expr) -> Unsupported:
    return Unsupported(f"the size {ast.unparse(node)} is not computed in C")


__all__ = ["size_code"]
