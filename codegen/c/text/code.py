"""Represents a C expression with its precedence and contents as data, so that no text is parsed."""

from __future__ import annotations

from dataclasses import dataclass

# The precedence of C's operators, loosest first.  A cast stands where an atom does.
CHOICE, BITS, COMPARE, SUM, QUOTIENT, PRODUCT, UNARY, ATOM = range(8)


@dataclass(frozen=True, slots=True)
class Code:
    """An expression: its text, and the precedence of its loosest operator.

    `unconditional`: it reads elements of arrays, or calls functions of the library, or an operand does: lanes need no
    masks if it is computed before a choice.
    """

    text: str
    binds: int = ATOM
    unconditional: bool = False

    def at(self, level: int = ATOM) -> str:
        """Return the text as an operand with at least the precedence `level`.

        >>> Code("a[i + 1]").at(), Code("a + b", SUM).at(), Code("i0/4", QUOTIENT).at(), Code("i0/4", QUOTIENT).at(SUM)
        ('a[i + 1]', '(a + b)', '(i0/4)', 'i0/4')
        """
        return self.text if self.binds >= level else f"({self.text})"

    def __str__(self) -> str:
        return self.text


def element_of(array: str, position: Code | str) -> Code:
    """Return the element of an array at a position."""
    return Code(f"{array}[{position}]", unconditional=True)
