"""Violated rules, and the errors that they become once the violating node is known."""

from __future__ import annotations

from fusion.lowering.errors import Origin, VerifyError


class Broken(Exception):
    """A rule is violated; the caller knows where."""


def require(holds: object, rule: str, *details: object) -> None:
    """Raise `rule`, its `{}` filled with `details`, unless it holds (formatted late, as sympy's text is slow)."""
    if not holds:
        raise Broken(rule.format(*details))


def defect(place: str, broken: Broken, origin: Origin | None = None) -> VerifyError:
    """Return the error for a rule that is violated at `place`."""
    return VerifyError(f"{place}: {broken}", hint="this is a defect of the compiler; please report it", origin=origin)
