"""The text form of expressions, Programs and Kernels, for people and for comparison.

What enters is a Program or a Kernel; what leaves is text with one line per node or statement.  Equal things give equal
text, whatever ran before, and the text is never longer than the data: a sub-expression that is used more than once, or
that makes a line too long, is named `%1`, `%2`, … on a line of its own above its first use.

    x[i0, i1]             one element of a buffer; `x[i0 if m]` is 0 where m is false, and nothing is read there
    index(4*i0 + 1)       the value of an index expression, an int64
    bf16(a), ~bf16(a)     conversion; `~`: only because eager would round here
    1.0  3  true          constants of float32, int64 and bool; any other dtype is said: `1.0_bf16`
    max0                  (in kernels) the result of the fold of that name
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import sympy
import torch

from lowering.expr import Cast, Const, Expr, Index, IndexValue, Load, Op, Random, TileRef, postorder
from lowering.indexing import FloorDiv, Mod
from lowering.kernel import Fold, Kernel, Loop, Param, Prefix, Stmt, statements, values_of
from lowering.program import (
    Axis,
    Buffer,
    BufferRef,
    Compute,
    Extern,
    Map,
    Node,
    Program,
    Reduce,
    Scan,
    Scatter,
    writes,
)
from lowering.scalar_ops import FOLD_OPS, accumulator

SHORT = 16
"""Text up to this length is repeated rather than named."""

LONG = 100
"""Text beyond this length is named, so that lines stay readable and nothing is copied over and over."""

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

_INFIX = {  # operation: (sign, precedence)
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
    """`f32`, `bf16`, `i64`, …"""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


# Indices --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def format_index(index: sympy.Expr) -> str:
    """An index expression, terms with the largest coefficient first.

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
    """Positive terms before negative ones, numbers after symbols, then the largest stride first."""
    number, rest = term.as_coeff_Mul()
    return bool(number < 0), bool(rest == 1), -abs(number), -len(sympy.Mul.make_args(rest)), str(rest)


def _inside(arg: sympy.Expr, weaker: str) -> str:
    """`arg` as an operand, in parentheses where its own operator is one of `weaker`."""
    own = "+" if arg.is_Add else "*" if arg.is_Mul else "/" if isinstance(arg, (FloorDiv, Mod)) else ""
    text = format_index(arg)
    return f"({text})" if (own and own in weaker) or text.startswith("-") else text


def _sizes(sizes: Iterable[sympy.Expr]) -> str:
    return ", ".join(format_index(size) for size in sizes)


# Expressions ----------------------------------------------------------------------------------------------------------


class _Names:
    """Text of expressions with shared and long ones named; `lines` holds the definitions that are not printed yet."""

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
        """`root` in full, its shared parts by name."""
        if root not in self.texts:
            for node in postorder(root):
                if node not in self.texts:
                    self.texts[node] = self._named(node, *self._compose(node), last=node is root)
        return self.texts[root][0]

    def _named(self, node: Expr, text: str, precedence: int, last: bool) -> tuple[str, int]:
        shared = self.users.get(node, 0) > 1 and len(text) > SHORT
        if isinstance(node, (Const, TileRef)) or not (shared or (len(text) > LONG and not last)):
            return text, precedence
        self.count += 1
        self.lines.append(f"%{self.count} = {text}")
        return f"%{self.count}", _ATOM

    def _operand(self, node: Expr, above: int) -> str:
        """A child's text, in parentheses if it binds less tightly than `above`."""
        text, precedence = self.texts[node]
        return text if precedence >= above else f"({text})"

    def _compose(self, node: Expr) -> tuple[str, int]:
        if isinstance(node, Load):
            mask = "" if node.mask is None else f" if {self._operand(node.mask, 0)}"
            return f"{node.buffer}[{', '.join(map(self.index, node.index))}{mask}]", _ATOM
        if isinstance(node, Const):
            text = format_const(node)
            return text, _UNARY if text.startswith("-") else _ATOM
        if isinstance(node, IndexValue):
            suffix = "" if node.dtype is torch.int64 else f"_{format_dtype(node.dtype)}"
            return f"index{suffix}({format_index(node.index)})", _ATOM
        if isinstance(node, Cast):
            return f"{'~' if node.implicit else ''}{format_dtype(node.dtype)}({self._operand(node.arg, 0)})", _ATOM
        if isinstance(node, Random):
            return f"{node.kind}({self._operand(node.seed, 0)}, {format_index(node.offset)})", _ATOM
        if isinstance(node, TileRef):
            return f"{node.name}'" if node.before else node.name, _ATOM
        assert isinstance(node, Op)
        return self._compose_op(node)

    def _compose_op(self, node: Op) -> tuple[str, int]:
        if node.name in _INFIX and len(node.args) == 2:
            sign, level = _INFIX[node.name]
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
        """One index of a load or store; a loaded value stands in it like any other."""
        return self._operand(index, 0) if isinstance(index, Expr) else format_index(index)


def format_const(node: Const) -> str:
    """A constant, with its dtype unless that is the usual one for its kind.

    >>> format_const(Const(-0.0, torch.float32)), format_const(Const(1, torch.int8))
    ('-0.0', '1_i8')
    """
    usual = node.dtype in (torch.float32, torch.int64, torch.bool)
    text = str(node.value).lower() if isinstance(node.value, bool) else repr(node.value)
    return text if usual else f"{text}_{format_dtype(node.dtype)}"


def format_expr(expr: Expr) -> str:
    """One expression; definitions of named parts come first, a line each.

    >>> f32 = torch.float32
    >>> x = Load("x", (sympy.Symbol("i0"),), f32)
    >>> half = Op("mul", (Const(0.5, f32), Op("exp", (Op("add", (x, Const(1.0, f32)), f32),), f32)), f32)
    >>> print(format_expr(Op("sub", (Op("mul", (half, x), f32), half), f32)))
    %1 = 0.5 * exp(x[i0] + 1.0)
    %1 * x[i0] - %1
    """
    names = _Names([expr])
    text = names.text(expr)
    return "\n".join([*names.lines, text])


# Programs -------------------------------------------------------------------------------------------------------------


def format_program(program: Program) -> str:
    """A Program: inputs, a line per node with its origin, outputs.

    >>> i, cpu = sympy.Symbol("i0"), torch.device("cpu")
    >>> two, one = sympy.Integer(2), sympy.Integer(1)
    >>> buffers = {name: Buffer(name, torch.float32, (two,), (one,), cpu) for name in ("x", "y")}
    >>> node = Map("y", (Axis(i, two),), Op("exp", (Load("x", (i,), torch.float32),), torch.float32))
    >>> print(format_program(Program(("x",), buffers, (node,), (BufferRef("y"),))))
    program on cpu
      input x: f32[2]
      y: f32[2] = map(i0:2) exp(x[i0])
      return y
    """
    devices = Counter(str(buffer.device) for buffer in program.buffers.values()).most_common(1)
    device = devices[0][0] if devices else "cpu"
    described = {name: _describe(buffer, device) for name, buffer in program.buffers.items()}
    lines = [f"program on {device}"]
    for entry in program.inputs:
        text = "unused" if entry is None else f"size {entry}" if isinstance(entry, sympy.Symbol) else described[entry]
        lines.append(f"  input {text}")
    lines.extend(f"  constant {described[name]}" for name in program.constants)
    for node in program.nodes:
        lines.extend(f"  {line}" for line in _node_lines(node, program, described))
    lines.append(f"  return {', '.join(map(_argument, program.outputs))}".rstrip())
    return "\n".join(lines)


def _describe(buffer: Buffer, device: str) -> str:
    """`name: dtype[shape]`, with strides unless they are row-major, with the device unless it is the usual one."""
    elsewhere = "" if str(buffer.device) == device else f" on {buffer.device}"
    return f"{buffer.name}: {_tensor(buffer.dtype, buffer.shape, buffer.strides)}{elsewhere}"


def _tensor(dtype: torch.dtype, shape: Sequence[sympy.Expr], strides: Sequence[sympy.Expr]) -> str:
    running: sympy.Expr = sympy.Integer(1)
    row_major = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        row_major = row_major and (size == 1 or stride == running)
        running = running * size
    text = f"{format_dtype(dtype)}[{_sizes(shape)}]"
    return text if row_major else f"{text} strides ({_sizes(strides)})"


def _node_lines(node: Node, program: Program, described: Mapping[str, str]) -> list[str]:
    if isinstance(node, Extern):
        outs = ", ".join("_" if name is None else described[name] for name in node.outs)
        arguments = [_argument(arg) for arg in node.args]
        arguments += [f"{key}={_argument(arg)}" for key, arg in node.kwargs.items()]
        notes = [note for note, on in (("view", node.is_view), ("impure", node.impure)) if on]
        notes += [node.reason] if node.reason else []
        body = f"{outs} = {node.name}({', '.join(arguments)})" + (f"  ({'; '.join(notes)})" if notes else "")
        names = _Names([])
    else:
        names = _Names(node.exprs)
        texts = [names.text(expr) for expr in node.exprs]
        values = _update(node, texts) if isinstance(node, Scatter) else ", ".join(texts)
        body = f"{described[node.out]} = {_head(node)} {values}"
    origin = next((program.origins[name] for name in writes(node) if name in program.origins), None)
    lines = [f"  {line}" for line in names.lines]
    return [*lines, f"{body}   # {origin}" if origin else body]


def _head(node: Compute) -> str:
    spaces = [", ".join(map(_axis, node.axes))] if node.axes else []
    if node.over:
        spaces.append(f"over {', '.join(map(_axis, node.over))}")
    inside = " ".join(spaces)
    if isinstance(node, Map):
        return f"map({inside})"
    if isinstance(node, Reduce):
        return f"{node.op}({inside})"
    if isinstance(node, Scatter):
        return f"scatter({inside}; into {node.start})"
    if isinstance(node, Scan):
        return f"running {node.op}({inside} along {node.along})"
    sides = f"rows {_symbols(node.rows)}, columns {_symbols(node.columns)}"
    return f"contract({inside}; {sides}; in {format_dtype(node.accumulate)})"


def _update(node: Scatter, texts: Sequence[str]) -> str:
    """What happens at a point of a scatter."""
    index = ", ".join(texts[1 : 1 + len(node.index)])
    condition = "" if node.where is None else f" where {texts[-1]}"
    return f"[{index}] {_assign(node.op)} {texts[0]}{condition}"


def _assign(op: str) -> str:
    return {"store": "=", "sum": "+=", "prod": "*="}.get(op, f"{op}=")


def _axis(axis: Axis) -> str:
    return f"{axis.symbol}:{format_index(axis.size)}"


def _symbols(symbols: Sequence[sympy.Symbol]) -> str:
    return " ".join(map(str, symbols)) or "none"


def _argument(arg: object) -> str:
    if isinstance(arg, BufferRef):
        return arg.name
    if isinstance(arg, sympy.Expr):
        return format_index(arg)
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_argument, arg))}]"
    if isinstance(arg, Mapping):
        return f"{{{', '.join(f'{key}: {_argument(part)}' for key, part in arg.items())}}}"
    return format_dtype(arg) if isinstance(arg, torch.dtype) else repr(arg)


# Kernels --------------------------------------------------------------------------------------------------------------


def format_kernel(kernel: Kernel) -> str:
    """A Kernel: params, axes with their roles, a line per statement.  Equal kernels give equal text.

    >>> from lowering.kernel import KernelAxis, Role, Store
    >>> i, r, n = sympy.Symbol("i0"), sympy.Symbol("r0"), sympy.Integer
    >>> params = tuple(Param(name, torch.float32, (n(8), n(5)), (n(5), n(1)), name == "out") for name in ("x", "out"))
    >>> x = Load("x", (5 * i + r,), torch.float32)
    >>> top = Fold("max0", "max", (x,), (r,), torch.float32)
    >>> store = Store("out", 5 * i + r, Op("exp", (Op("sub", (x, top.ref), torch.float32),), torch.float32))
    >>> axes = (KernelAxis(i, n(8), Role.GRID), KernelAxis(r, n(5), Role.WHOLE))
    >>> print(format_kernel(Kernel("softmax", params, (), axes, (top, store))))
    kernel softmax(x: f32[8, 5], out: f32[8, 5] written)
      grid  i0: 8
      whole r0: 5
      max0 = max over r0 of x[5*i0 + r0]
      store out[5*i0 + r0] = exp(x[5*i0 + r0] - max0)
    """
    params = [*map(_param, kernel.params), *(f"size {symbol}" for symbol in kernel.sizes)]
    lines = [f"kernel {kernel.name}({', '.join(params)})", *_part_lines(kernel)]
    parts, last = [("beside", part) for part in kernel.beside], kernel.then
    while last is not None:
        parts.append(("then", last))
        last = last.then
    for word, part in parts:
        taken = [*(param.name for param in part.params), *map(str, part.sizes)]
        lines += [f"{word} {part.name}({', '.join(taken)})", *_part_lines(part)]
    return "\n".join(lines)


def _part_lines(kernel: Kernel) -> list[str]:
    axes = [f"  {axis.role.value:<5} {axis.symbol}: {format_index(axis.size)}" for axis in kernel.axes]
    names = _Names(value for stmt in statements(kernel.body) for value in values_of(stmt))
    return [*axes, *_body_lines(kernel.body, names, "  ")]


def _param(param: Param) -> str:
    notes = [note for note, on in ((" written", param.written), (" unaligned", not param.aligned)) if on]
    return f"{param.name}: {_tensor(param.dtype, param.shape, param.strides)}{''.join(notes)}"


def _body_lines(body: Sequence[Stmt], names: _Names, indent: str) -> list[str]:
    lines: list[str] = []
    for stmt in body:
        if isinstance(stmt, Loop):
            condition = "" if stmt.where is None else f" where {names.text(stmt.where)}"
            lines.extend(indent + line for line in names.lines)
            names.lines.clear()
            lines.append(f"{indent}loop {_symbols(stmt.axes)}{condition}")
            lines.extend(_body_lines(stmt.body, names, indent + "  "))
            continue
        values = [names.text(value) for value in values_of(stmt)]
        if isinstance(stmt, Prefix):
            text = f"{stmt.name} = running {stmt.op} along {stmt.along} of {', '.join(values)}"
        elif isinstance(stmt, Fold):
            text = f"{stmt.name} = {stmt.op} over {_symbols(stmt.over)} of {', '.join(values[: len(stmt.args)])}"
            text += _fold_notes(stmt)
            text += "" if stmt.carry is None else f"   carrying {values[-1]}"
        else:
            text = f"store {stmt.param}[{names.index(stmt.offset)}] {_assign(stmt.op)} {values[0]}"
            text += "" if stmt.axes is None else f"   at each {_symbols(stmt.axes)}"
            text += "" if stmt.where is None else f" where {values[-1]}"
        lines.extend(indent + line for line in names.lines)
        names.lines.clear()
        lines.append(indent + text)
    return lines


def _fold_notes(stmt: Fold) -> str:
    """What is not said by the operation and its operands."""
    operand = stmt.args[0].dtype
    usual = accumulator(stmt.op, operand) if stmt.op == "dot" else operand
    usual = torch.int64 if FOLD_OPS[stmt.op].result == "int64" else usual
    notes = "" if stmt.dtype is usual else f"   in {format_dtype(stmt.dtype)}"
    return notes + (f"   rows {_symbols(stmt.rows)}, columns {_symbols(stmt.columns)}" if stmt.op == "dot" else "")


__all__ = ["format_const", "format_dtype", "format_expr", "format_index", "format_kernel", "format_program"]
