"""Writes stores: plain ones, and those that combine with the element if several points may collide.

Input: a store and the texts of its element, value and condition; output: one C statement.  Points run one after the
other, so that nothing needs to be atomic.  Refused (BuildError): sums of 16-bit floats in memory.
"""

from __future__ import annotations

import torch

from fusion.codegen.c.text.code import Code
from fusion.codegen.c.text.operations import operation_code
from fusion.codegen.c.text.storage import NARROW_FLOATS
from fusion.lowering.errors import BuildError
from fusion.lowering.kernel import Store

_JOINS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def statement(store: Store, dtype: torch.dtype, element: Code, value: Code, where: Code | None) -> str:
    """Return the statement that writes `value` to an element of `dtype`, or combines the two."""
    if store.op != "store":
        if dtype in NARROW_FLOATS:
            raise BuildError(f"{store.param}: values that meet are joined in 32 bits, not in {dtype}")
        value = operation_code(_JOINS[store.op], dtype, dtype, [element, value])
    text = f"{element} = {value};"
    return text if where is None else f"if ({where}) {text}"
