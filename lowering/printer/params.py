"""Parameters as comments in a generated source."""

from __future__ import annotations

from fusion.lowering.kernel import Param


def format_param(param: Param) -> str:
    """Format a parameter's element type, shape and strides, and whether it is written.

    >>> import sympy, torch
    >>> two, three = sympy.Integer(2), sympy.Integer(3)
    >>> format_param(Param("x", torch.bfloat16, (two, three), (three, sympy.Integer(1)), written=True))
    'bfloat16[2, 3] strides [3, 1], written'
    """
    shape = ", ".join(str(size) for size in param.shape)
    strides = ", ".join(str(stride) for stride in param.strides)
    dtype = str(param.dtype).removeprefix("torch.")
    return f"{dtype}[{shape}] strides [{strides}]" + (", written" if param.written else "")
