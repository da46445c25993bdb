"""Writes scans: the declarations before their loop, and the computation at each point.

Input: a `Prefix` with the texts of its operands; output: the text of its value at the current point. The lanes of a
nest never run along a scanned axis: either there are none, or each has its own scan, in an array.

float32 is accumulated in double, as eager does on a CPU.  Extremes keep the later of equals, and NaN wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.codegen.c.loops.folds import LoopLevels
from fusion.codegen.c.text.code import Code, element_of
from fusion.codegen.c.text.nest import Namespace
from fusion.codegen.c.text.storage import VALUE_TYPES, constant
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.expr import Scalar
from fusion.lowering.ir.kernel import Prefix
from fusion.lowering.ir.scalar_ops import SCAN_OPS, identity


def write_scan(scan: Prefix, args: Sequence[Code], place: LoopLevels, space: Namespace) -> Code:
    """Write the code of `scan` at its loop levels and return its value; `args` are names or literals.

    Raises:
        BuildError: a scan that the C target does not know.
    """
    held, dtype = VALUE_TYPES[scan.dtype], scan.args[0].dtype
    name, value = space.fresh(scan.name), args[0]
    if sign := SCAN_OPS[scan.op].sign:
        wide = torch.float64 if dtype is torch.float32 else dtype
        total = _state(wide, space.fresh(f"{name}_total"), identity(scan.op, dtype), place)
        lines = [f"{total} {sign}= {value};", f"const {held} {name} = ({held}){total};"]
    elif scan.op == "logsumexp":
        lines = _log_sum(held, name, value, place, space)
    elif scan.op in ("max", "min", "argmax", "argmin"):
        lines = _extreme(scan, name, args, place, space)
    else:
        raise BuildError(f"the C target does not know the scan {scan.op} of {dtype}")
    place.inner.before += lines
    return Code(name)


def _extreme(scan: Prefix, name: str, args: Sequence[Code], place: LoopLevels, space: Namespace) -> list[str]:
    """Return lines that compute the best value so far, or its position."""
    dtype, value = scan.args[0].dtype, args[0]
    best = _state(dtype, space.fresh(f"{name}_best"), identity(scan.op, dtype), place)
    sign = ">=" if scan.op in ("max", "argmax") else "<="
    later = space.fresh("later")
    lines = [f"const _Bool {later} = ({value} {sign} {best}) | ({value} != {value});"]
    lines.append(f"{best} = {later} ? {value} : {best};")
    result = best
    if len(args) > 1:
        result = _state(scan.dtype, space.fresh(f"{name}_at"), 0, place)
        lines.append(f"{result} = {later} ? {args[1]} : {result};")
    return [*lines, f"const {VALUE_TYPES[scan.dtype]} {name} = {result};"]


def _log_sum(held: str, name: str, value: Code, place: LoopLevels, space: Namespace) -> list[str]:
    """Return lines for the running maximum, and the sum of exponentials relative to it (1 for equal infinities)."""
    largest = _state(torch.float64, space.fresh(f"{name}_largest"), float("-inf"), place)
    total = _state(torch.float64, space.fresh(f"{name}_total"), 0.0, place)
    x, scale = space.fresh("x"), space.fresh("scale")
    return [
        f"const double {x} = {value};",
        f"const double {scale} = {x} == {largest} ? 1.0 : exp(-__builtin_fabs({x} - {largest}));",
        f"{total} = {x} > {largest} ? {total} * {scale} + 1.0 : {total} + {scale};",
        f"{largest} = {x} > {largest} ? {x} : {largest};",
        f"const {held} {name} = ({held})(log({total}) + {largest});",
    ]


def _state(dtype: torch.dtype, name: str, first: Scalar, place: LoopLevels) -> Code:
    """Declare a loop-carried value with the initial value `first`; return it at the current lane."""
    held, start = VALUE_TYPES[dtype], constant(first, dtype)
    if place.lanes is None:
        place.outer.before.append(f"{held} {name} = {start};")
        return Code(name)
    element = element_of(name, place.lanes.slot)
    place.outer.before.append(f"_Alignas(64) {held} {name}[{place.lanes.size}];")
    place.outer.before.append(f"{place.lanes.header} {element} = {start};")
    return element


__all__ = ["write_scan"]
