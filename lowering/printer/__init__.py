"""Prints expressions, Programs and Kernels as text, for people and for comparison.

Input: a Program or a Kernel; output: text with one line per node or statement.  Equal objects give equal text, in any
order of calls, and the text is never longer than the data: a sub-expression that is used more than once, or that makes
a line too long, is named `%1`, `%2`, … on a line of its own above its first use.

    x[i0, i1]             one element of a buffer; `x[i0 if m]` is 0 where m is false, and nothing is read there
    index(4*i0 + 1)       the value of an index expression, an int64
    bf16(a), ~bf16(a)     conversion; `~`: only because eager would round here
    1.0  3  true          constants of float32, int64 and bool; any other dtype is a suffix: `1.0_bf16`
    max0                  (in kernels) the result of the fold of that name
"""

from __future__ import annotations

from fusion.lowering.printer.expressions import format_expr, format_index
from fusion.lowering.printer.kernels import format_kernel, format_param
from fusion.lowering.printer.programs import format_bytes, format_nodes, format_program

__all__ = [
    "format_bytes",
    "format_expr",
    "format_index",
    "format_kernel",
    "format_nodes",
    "format_param",
    "format_program",
]
