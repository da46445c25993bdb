"""Prints Programs as text: inputs, one line for each node, outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from typing_extensions import assert_never

from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import (
    Axis,
    Buffer,
    BufferRef,
    Compute,
    Contract,
    Extern,
    Map,
    Node,
    Program,
    Reduce,
    Scan,
    Scatter,
    writes,
)
from fusion.lowering.ir.scalar_ops import ScatterName
from fusion.lowering.printer.expressions import ExpressionPrinter, format_dtype, format_index, sizes_text


def format_program(program: Program) -> str:
    """Format a Program: inputs, a line per node with its origin, outputs.

    >>> from fusion.lowering.ir.expr import Load, Op
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
    device, described = _described(program)
    lines = [f"program on {device}"]
    for entry in program.inputs:
        text = "unused" if entry is None else f"size {entry}" if isinstance(entry, sympy.Symbol) else described[entry]
        lines.append(f"  input {text}")
    lines.extend(f"  constant {described[name]}" for name in program.constants)
    for node in program.nodes:
        lines.extend(f"  {line}" for line in _node_lines(node, program, described))
    lines.append(f"  return {', '.join(map(_argument, program.outputs))}".rstrip())
    return "\n".join(lines)


def format_nodes(program: Program) -> Iterator[str]:
    """Format each node by itself, in order, with its origin; shared sub-expressions take lines above it."""
    _, described = _described(program)
    for node in program.nodes:
        yield "\n".join(_node_lines(node, program, described))


def _described(program: Program) -> tuple[str, dict[str, str]]:
    """Return the device of most buffers, and the text of each buffer."""
    devices = Counter(str(buffer.device) for buffer in program.buffers.values()).most_common(1)
    device = devices[0][0] if devices else "cpu"
    return device, {name: _describe(buffer, device) for name, buffer in program.buffers.items()}


def _describe(buffer: Buffer, device: str) -> str:
    """Format `name: dtype[shape]`, with strides unless row-major, and the device unless it is the usual one."""
    elsewhere = "" if str(buffer.device) == device else f" on {buffer.device}"
    return f"{buffer.name}: {tensor_text(buffer.dtype, buffer.shape, buffer.strides)}{elsewhere}"


def tensor_text(dtype: torch.dtype, shape: Sequence[sympy.Expr], strides: Sequence[sympy.Expr]) -> str:
    """Format `f32[2, 3]`, with its strides where they are not row-major."""
    running: sympy.Expr = sympy.Integer(1)
    row_major = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        row_major = row_major and (size == 1 or stride == running)
        running = running * size
    text = f"{format_dtype(dtype)}[{sizes_text(shape)}]"
    return text if row_major else f"{text} strides ({sizes_text(strides)})"


def _node_lines(node: Node, program: Program, described: Mapping[str, str]) -> list[str]:
    match node:
        case Extern():
            names, body = ExpressionPrinter([]), _call(node, described)
        case Chunked():
            names, body = ExpressionPrinter([]), _chunked(node, described)
        case Map() | Reduce() | Scan() | Contract() | Scatter():
            names = ExpressionPrinter(node.exprs)
            texts = [names.text(expr) for expr in node.exprs]
            values = _update(node, texts) if isinstance(node, Scatter) else ", ".join(texts)
            body = f"{described[node.out]} = {_head(node)} {values}"
        case _:
            assert_never(node)
    origin = next((program.origins[name] for name in writes(node) if name in program.origins), None)
    lines = [f"  {line}" for line in names.lines]
    return [*lines, f"{body}   # {origin}" if origin else body]


def _chunked(node: Chunked[Program], described: Mapping[str, str]) -> str:
    outs = ", ".join(described[name] for name in node.outs)
    read = [name if cut is None else f"{name} cut along {cut}" for name, cut in node.sliced]
    return f"{outs} = {node.name}({format_index(node.length)} points of {', '.join(read)})  ({node.reason})"


def _call(node: Extern, described: Mapping[str, str]) -> str:
    outs = ", ".join("_" if name is None else described[name] for name in node.outs)
    arguments = [_argument(arg) for arg in node.args]
    arguments += [f"{key}={_argument(arg)}" for key, arg in node.kwargs.items()]
    notes = [note for note, on in (("view", node.is_view), ("impure", node.impure)) if on]
    notes += [node.reason] if node.reason else []
    return f"{outs} = {node.name}({', '.join(arguments)})" + (f"  ({'; '.join(notes)})" if notes else "")


def _head(node: Compute) -> str:
    spaces = [", ".join(map(axis_text, node.axes))] if node.axes else []
    if node.over:
        spaces.append(f"over {', '.join(map(axis_text, node.over))}")
    inside = " ".join(spaces)
    match node:
        case Map():
            return f"map({inside})"
        case Reduce():
            return f"{node.op}({inside})"
        case Scan():
            return f"running {node.op}({inside} along {node.along})"
        case Contract():
            sides = f"rows {symbols_text(node.rows)}, columns {symbols_text(node.columns)}"
            return f"contract({inside}; {sides}; in {format_dtype(node.accumulate)})"
        case Scatter():
            return f"scatter({inside}; into {node.start})"
        case _:
            assert_never(node)


def _update(node: Scatter, texts: Sequence[str]) -> str:
    """Format the update at a point of a scatter."""
    index = ", ".join(texts[1 : 1 + len(node.index)])
    condition = "" if node.where is None else f" where {texts[-1]}"
    return f"[{index}] {assign_text(node.op)} {texts[0]}{condition}"


def assign_text(op: ScatterName) -> str:
    """Return the operator of an update: `+=`, or its name where there is no operator: `max=`."""
    return {"store": "=", "sum": "+=", "prod": "*="}.get(op, f"{op}=")


def axis_text(axis: Axis) -> str:
    """Format an axis with its size: `i0:16`."""
    return f"{axis.symbol}:{format_index(axis.size)}"


def symbols_text(symbols: Sequence[sympy.Symbol]) -> str:
    """Format symbols: `i0 r0`, or `none`."""
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
    if isinstance(arg, fx.GraphModule):
        return "a graph"
    if isinstance(arg, OpOverload):
        return str(arg)
    return format_dtype(arg) if isinstance(arg, torch.dtype) else repr(arg)


def format_bytes(count: int) -> str:
    """Format a number of bytes in the largest unit that is not below 1.

    >>> format_bytes(512), format_bytes(3 * 1024 * 1024), format_bytes(5 << 40)
    ('512 B', '3.0 MiB', '5120.0 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
