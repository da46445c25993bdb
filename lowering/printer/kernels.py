"""Prints Kernels as text: parameters, axes with their roles, statements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import assert_never

from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Param, Prefix, Stmt, Store, statements, values_of
from fusion.lowering.ir.scalar_ops import accumulator, keeps_position
from fusion.lowering.printer.expressions import ExpressionPrinter, format_dtype, format_index
from fusion.lowering.printer.programs import assign_text, symbols_text, tensor_text


def format_kernel(kernel: Kernel) -> str:
    """Format a Kernel: params, axes with their roles, a line per statement.  Equal kernels give equal text.

    >>> import sympy
    >>> from fusion.lowering.ir.expr import Load, Op
    >>> from fusion.lowering.ir.kernel import KernelAxis, Role, Store
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
    names = ExpressionPrinter(value for stmt in statements(kernel.body) for value in values_of(stmt))
    return [*axes, *_body_lines(kernel.body, names, "  ")]


def _param(param: Param) -> str:
    flags = ((" written", param.written), (" unaligned", not param.aligned), (" number", param.number))
    notes = [note for note, on in flags if on]
    return f"{param.name}: {tensor_text(param.dtype, param.shape, param.strides)}{''.join(notes)}"


def _body_lines(body: Sequence[Stmt], names: ExpressionPrinter, indent: str) -> list[str]:
    lines: list[str] = []
    for stmt in body:
        if isinstance(stmt, Loop):
            condition = "" if stmt.where is None else f" where {names.text(stmt.where)}"
            lines.extend(indent + line for line in names.lines)
            names.lines.clear()
            lines.append(f"{indent}loop {symbols_text(stmt.axes)}{condition}")
            lines.extend(_body_lines(stmt.body, names, indent + "  "))
            continue
        values = [names.text(value) for value in values_of(stmt)]
        match stmt:
            case Fold():
                args = ", ".join(values[: len(stmt.args)])
                text = f"{stmt.name} = {stmt.op} over {symbols_text(stmt.over)} of {args}{_fold_notes(stmt)}"
                text += "" if stmt.carry is None else f"   carrying {values[-1]}"
            case Prefix():
                text = f"{stmt.name} = running {stmt.op} along {stmt.along} of {', '.join(values)}"
            case Store():
                text = f"store {stmt.param}[{names.index(stmt.offset)}] {assign_text(stmt.op)} {values[0]}"
                text += "" if stmt.axes is None else f"   at each {symbols_text(stmt.axes)}"
                text += "" if stmt.where is None else f" where {values[-1]}"
            case _:
                assert_never(stmt)
        lines.extend(indent + line for line in names.lines)
        names.lines.clear()
        lines.append(indent + text)
    return lines


def _fold_notes(stmt: Fold) -> str:
    """Note the dtype of a fold if it is unusual, and the rows and columns of a product."""
    operand = stmt.args[0].dtype
    usual = accumulator(stmt.op, operand) if stmt.op == "dot" else operand
    usual = torch.int64 if keeps_position(stmt.op) else usual
    notes = "" if stmt.dtype is usual else f"   in {format_dtype(stmt.dtype)}"
    return notes + (
        f"   rows {symbols_text(stmt.rows)}, columns {symbols_text(stmt.columns)}" if stmt.op == "dot" else ""
    )


def format_param(param: Param) -> str:
    """Format a parameter's element type, shape and strides, whether it is written, and whether all that is computed
    from it is rounded.

    >>> import sympy, torch
    >>> two, three = sympy.Integer(2), sympy.Integer(3)
    >>> format_param(Param("x", torch.bfloat16, (two, three), (three, sympy.Integer(1)), written=True))
    'bfloat16[2, 3] strides [3, 1], written'
    """
    shape = ", ".join(str(size) for size in param.shape)
    strides = ", ".join(str(stride) for stride in param.strides)
    dtype = str(param.dtype).removeprefix("torch.")
    notes = (", written" if param.written else "") + (", rounded later" if param.rounded_later else "")
    return f"{dtype}[{shape}] strides [{strides}]{notes}"
