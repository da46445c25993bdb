"""Composes Triton text from smaller pieces, with its properties as data, so that no text is parsed.

An expression or a line is a template and its operands, `compose("tl.load({}, mask={})", pointer, mask)`, and reads the
names that these read.  An operand that is a `str` is a name, of a variable or of a function.  Names that no one asks
for, such as those of Triton's own functions, may be part of the template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fusion.lowering.ir.expr import Scalar

# Precedence of Python's operators, lowest first.
COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(9)

FOLD_OPERATORS = {"+": SUM, "*": PRODUCT, "|": OR, "&": AND}
"""Operator that joins the results of a fold (`FoldOp.sign`) → its precedence."""


@dataclass(frozen=True, slots=True)
class Code:
    """An expression, or a line.

    Attributes:
        binds: the precedence of its loosest operator.
        number: the number that it is, if it is a bare literal.
        reads: the names in it, in order, each once; with a dot for names of a module, such as `tl.dot`.
        negated: the code of which it is the negative by its sign alone, if it is one.
        wide: whether it was cast to an int64, so that sums with it are int64 too.
    """

    text: str
    binds: int = ATOM
    number: Scalar | None = None
    reads: tuple[str, ...] = ()
    negated: Code | None = field(default=None, compare=False)
    wide: bool = field(default=False, compare=False)

    @property
    def literal(self) -> bool:
        """Whether the code is a bare literal, which has no type in Triton."""
        return self.number is not None

    @property
    def is_name(self) -> bool:
        """Whether the code is a name, which may be repeated at no cost."""
        return self.text.isidentifier()

    def at(self, level: int) -> Code:
        """Return the code as an operand of precedence `level`: in parentheses if its own is lower."""
        return self if self.binds >= level else Code(f"({self.text})", reads=self.reads)


Operand: TypeAlias = "Code | str | int"


def compose(template: str, *operands: Operand, binds: int = ATOM) -> Code:
    """Return `template` with `operands` in place of its `{}`, and with the names that they read.

    >>> compose("{}({}, {})", "_maximum", compose("{} + {}", "a", 1, binds=SUM), "b").text
    '_maximum(a + 1, b)'
    >>> compose("{}.load({})", "desc", compose("[{0}, {0}]", "m0")).reads
    ('desc', 'm0')
    """
    codes = [as_code(operand) for operand in operands]
    return Code(template.format(*(code.text for code in codes)), binds, reads=names_in(codes))


def minus(operand: Code, number: Scalar | None = None) -> Code:
    """Return the negative of `operand`; `number` is its value, if it is a bare literal.

    >>> minus(compose("a + b", binds=SUM)).text
    '-(a + b)'
    """
    positive = operand.at(UNARY)
    return Code(f"-{positive.text}", UNARY, number, positive.reads, negated=positive)


def widened(code: Code) -> Code:
    """Return integers as int64.

    >>> widened(Code("a * b", PRODUCT)).text
    '(a * b).to(tl.int64)'
    """
    return replace(compose("{}.to(tl.int64)", code.at(ATOM)), wide=True)


def listed(operands: Iterable[Operand], separator: str = ", ", binds: int = ATOM) -> Code:
    """Return operands in a row, such as the arguments of a call.

    >>> listed(["a", Code("1"), "b"]).text
    'a, 1, b'
    """
    every = list(operands)
    return compose(separator.join(["{}"] * len(every)), *every, binds=binds)


def names_in(codes: Iterable[Code]) -> tuple[str, ...]:
    """Return the names that any of these read, in order, each once."""
    return tuple(dict.fromkeys(name for code in codes for name in code.reads))


def as_code(operand: Operand) -> Code:
    """Return an operand as code: a name reads itself."""
    if isinstance(operand, Code):
        return operand
    if isinstance(operand, int):
        return Code(str(operand))
    assert all(word.isidentifier() for word in operand.split(".")), f"{operand!r} is not a name"
    return Code(operand, reads=(operand,))
