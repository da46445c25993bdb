"""A rule that is broken, and the error that it becomes where it is known what broke it."""

from __future__ import annotations

from fusion.lowering.errors import Origin, VerifyError


class Broken(Exception):
    """A rule is broken; the caller knows where."""


def require(holds: object, rule: str, *details: object) -> None:
    """Raise `rule`, its `{}` filled with `details`, unless it holds (sympy's text is slow: none is made in vain)."""
    if not holds:
        raise Broken(rule.format(*details))


def defect(place: str, broken: Broken, origin: Origin | None = None) -> VerifyError:
    """The error of a rule that is broken at `place`."""
    return VerifyError(f"{place}: {broken}", hint="this is a defect of the compiler; please report it", origin=origin)
