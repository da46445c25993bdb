"""Writes the C code that all folds share: the identity, the combination of two results, the OpenMP clauses.

Input: a `Fold` and the code of its operands and accumulators; output: lines of C.  Maxima and minima give NaN where an
operand is NaN; truth values are folded with `|` and `&`.  A store folds into its element if several points may collide:
these run one after the other, so that nothing needs to be atomic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusion.codegen.c.text.code import Code
from fusion.codegen.c.text.operations import operation_code
from fusion.codegen.c.text.storage import NARROW_FLOATS, VALUE_TYPES, constant
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Fold, Store
from fusion.lowering.ir.scalar_ops import FOLD_OPS, FoldName, identity, joined_by

NEVER = Code("INT64_MAX")
"""The position of an argmax or argmin before the first element."""

_TRUTH: Mapping[FoldName, FoldName] = {"max": "any", "min": "all", "sum": "any", "prod": "all"}


def started(fold: Fold, dtype: torch.dtype | None = None) -> Code:
    """Return the value of `fold` over nothing, in its dtype; of an argmax or argmin, in the dtype of the values."""
    dtype = fold.dtype if dtype is None else dtype
    return constant(identity(fold.op, dtype), dtype)


def sign(fold: Fold) -> str:
    """Return the operator that combines two results of `fold`, as OpenMP names it."""
    op = _operation(fold)
    return FOLD_OPS[op].sign or op


def across_lanes(fold: Fold, total: object) -> str:
    """Return the clause by which OpenMP combines the lanes of `fold`, whose result is `total`."""
    op = _operation(fold)
    if op in ("max", "min") and fold.dtype.is_floating_point:
        return f"reduction(EXTREME({op}):{total})"
    return f"reduction({sign(fold)}:{total})"


def combined(fold: Fold, left: Code, right: Code) -> str:
    """Combine two results of `fold`; where one is NaN, so is theirs."""
    op = _operation(fold)
    if op in ("max", "min"):
        return f"{op}imum_{VALUE_TYPES[fold.dtype]}({right}, {left})"
    return f"{left} {FOLD_OPS[op].sign} {right.at()}"


def _operation(fold: Fold) -> FoldName:
    """Return the operation of `fold`; truth values have another one."""
    return _TRUTH.get(fold.op, fold.op) if VALUE_TYPES[fold.dtype] == "_Bool" else fold.op


def better(fold: Fold, total: Code, value: Code) -> str:
    """Return the line that updates a maximum or minimum with a value that is not NaN."""
    return f"{total} = {value} {'>' if fold.op == 'max' else '<'} {total} ? {value} : {total};"


@dataclass(frozen=True, slots=True)
class NanWatch:
    """A variable that notes whether a NaN was seen, which leaves one machine instruction for the comparison itself.

    `shares`: the length of an array of such variables, `l` being the current one, one for each partial result of type
    `held`; None for a single variable.
    """

    name: str
    held: str
    shares: int | None = None

    @property
    def before(self) -> list[str]:
        """Return the declaration of the variable, for the lines before the loop."""
        if self.shares is None:
            return [f"int {self.name} = 0;"]
        start = f"for (int l = 0; l < {self.shares}; l++) {self.name}[l] = 0;"
        return [f"_Alignas(64) {self._type} {self.name}[{self.shares}];", start]

    @property
    def clauses(self) -> list[str]:
        """Return the variable's clause of the OpenMP reduction."""
        return [f"reduction(|:{self.name})"] if self.shares is None else []

    def look(self, value: Code) -> str:
        """Return the line that tests whether a value is NaN."""
        return f"{self.name}{'' if self.shares is None else '[l]'} |= {value} != {value};"

    def result(self, of_the_rest: str) -> str:
        """Return the result: NaN if one was seen, else the result of the other values."""
        seen = self.name if self.shares is None else f"any_of_{self._type}({self.name}, {self.shares})"
        nan = constant(float("nan"), torch.float64 if self.held == "double" else torch.float32)
        return f"{seen} ? {nan} : {of_the_rest}"

    @property
    def _type(self) -> str:
        """The integers of the same width as the partial results, so that both fill vectors alike."""
        return "int64_t" if self.held == "double" else "int32_t"


def compared_as(dtype: torch.dtype) -> str:
    """Return the C type in which values of an argmax or argmin are compared."""
    return "uint8_t" if VALUE_TYPES[dtype] == "_Bool" else VALUE_TYPES[dtype]


def takes(fold: Fold) -> str:
    """Return the function that decides which of two values, with their positions, an argmax or argmin takes."""
    return f"{fold.op}_takes_{compared_as(fold.args[0].dtype)}"


def take(fold: Fold, took: str, value: Code, index: Code, best: Code, at: Code) -> list[str]:
    """Return the lines by which an argmax or argmin takes in a value and its position."""
    return [
        f"const _Bool {took} = {takes(fold)}({value}, {index}, {best}, {at});",
        f"{best} = {took} ? {value} : {best};",
        f"{at} = {took} ? {index} : {at};",
    ]


def store_statement(store: Store, dtype: torch.dtype, element: Code, value: Code, where: Code | None) -> str:
    """Return the statement that writes `value` to an element of `dtype`, or combines the two.

    Raises:
        BuildError: a sum of 16-bit floats in memory.
    """
    if store.op != "store":
        if dtype in NARROW_FLOATS:
            raise BuildError(f"{store.param}: values that meet are joined in 32 bits, not in {dtype}")
        value = operation_code(joined_by(store.op), dtype, dtype, [element, value])
    text = f"{element} = {value};"
    return text if where is None else f"if ({where}) {text}"
