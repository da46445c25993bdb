"""Operands that an operation checks: they keep their values, and a launch fails where a condition does not hold."""

from __future__ import annotations

from collections.abc import Callable

from fusion.lowering.checks import required
from fusion.lowering.requirements import Requirement
from fusion.lowering.rules.formula import Term
from fusion.lowering.rules.promotion import combine
from fusion.lowering.value import Value


def requiring(requirement: Requirement, test: Callable[..., Term], x: Value, *others: Value) -> Value:
    """Return x; `test` of each of its elements, and of those of `others`, which broadcast against x, has to hold."""
    return combine(lambda *terms: Term(required(terms[0].expr, test(*terms).expr, requirement)), x, *others)
