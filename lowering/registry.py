"""Registers lowering rules: ATen overload → function from values to values.

A rule takes the context (`builder.Builder`) and the arguments of the call, tensors as `Value`, symbolic integers as
sympy expressions.  It returns the result as a `Value` (or a tuple of them), or raises `Unsupported` with the reason;
the call then stays an extern.  A second rule for the same overload is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch._ops import OpOverload

from fusion.lowering.value import Value

Result: TypeAlias = "Value | tuple[Value | None, ...]"
Rule = TypeVar("Rule", bound=Callable[..., Result])


@dataclass(frozen=True, slots=True)
class RegisteredRule:
    """A rule, and whether its result stays an expression (views, constants) instead of becoming a node."""

    rule: Callable[..., Result]
    lazy: bool


RULES: dict[OpOverload, RegisteredRule] = {}


def lowers(*targets: OpOverload, lazy: bool = False) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of `targets`.

    Args:
        lazy: the result costs nothing to recompute (a view, a constant); it is read through rather than stored.
    """

    def register(rule: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} already has a rule: {RULES[target].rule.__qualname__}")
            RULES[target] = RegisteredRule(rule, lazy)
        return rule

    return register
