"""Checks, at each call of a compiled region, conditions that neither Dynamo nor AOTAutograd checks.

Input: Dynamo's graph and AOTAutograd's metadata of it; output: facts, which can be serialised, and from these and the
compiled function a callable.  Where a region was not compiled for a call, the captured graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from torch import fx

from fusion.joint.dependence import Dependence
from fusion.lowering.errors import Unsupported
from fusion.runtime.overlaps import Overlaps
from fusion.runtime.rng_replay import Draws
from fusion.runtime.second_derivatives import Derivatives
from fusion.runtime.wide_integers import Integers

Run: TypeAlias = Callable[..., object]

OTHER_OVERLAPS = (
    "the inputs overlap otherwise than those that this was compiled for, are views of no common tensor, or one is"
    " changed that is part of other memory, and a result is a view of it"
)
"""Why a call runs eagerly whose inputs overlap differently than at compilation."""

TOO_WIDE = "an integer of the call, or one computed from it, needs more than 64 bits"
"""Why a call runs eagerly that computes with such an integer."""


class RegionFallback(Protocol):
    """The program of a region, for calls that the compiled one is not for."""

    def __call__(self, *args: object) -> object:
        """Run it operation by operation, for derivatives that the compiled region does not have."""

    def instead(self, message: str, hint: str = "") -> Run:
        """Return a function that runs it with a warning, or raises."""

    def say(self, reason: Unsupported) -> None:
        """Warn that it runs."""


@dataclass(frozen=True, slots=True)
class Guards:
    """Holds the assumptions of a region's compiled form about its calls, and the known facts about its derivatives."""

    derivatives: Derivatives | None
    overlaps: Overlaps
    integers: Integers

    @classmethod
    def of(
        cls, graph: fx.GraphModule, inputs: Sequence[object], facts: tuple[Dependence | None, Draws | None]
    ) -> Guards:
        """Return the guards of `graph`, compiled for `inputs` in the current tracing context.

        Args:
            facts: the dependence of gradients on inputs, and the random draws, where these are known.
        """
        return cls(Derivatives.of(inputs, *facts), Overlaps.of(inputs), Integers.of(graph))

    def around(self, compiled: Run, captured: RegionFallback) -> Run:
        """Return `compiled` between these guards."""
        if self.derivatives is not None:
            eager = cast("Callable[..., Sequence[object]]", captured)
            compiled = self.derivatives.around(compiled, eager, captured.say)
        hint = "give it copies (clone) of what overlaps"
        compiled = self.overlaps.around(compiled, captured.instead(OTHER_OVERLAPS, hint))
        return self.integers.around(compiled, captured.instead(TOO_WIDE))


__all__ = ["OTHER_OVERLAPS", "Guards", "RegionFallback"]
