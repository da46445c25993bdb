"""Relates the operations of a lowered graph to the steps that compute them, and refusals to the steps at their ends.

Input: operations, and launches and calls in order; output: positions in either list.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.inspect.graphs import OperationReport
from fusion.inspect.report import ExternReport, KernelReport
from fusion.lowering.errors import Origin


class Edges:
    """The steps of each operation, the operations of each step, and the steps that make and take tensors."""

    def __init__(self, lowered: Sequence[OperationReport], steps: Sequence[KernelReport | ExternReport]) -> None:
        self._steps = steps
        by_origin: dict[Origin, list[int]] = {}
        for number, operation in enumerate(lowered):
            if operation.kind != "view":
                by_origin.setdefault(operation.origin, []).append(number)
        origins = [dict.fromkeys(_origins(step)) for step in steps]
        self.operations = [[k for origin in each for k in by_origin.get(origin, ())] for each in origins]
        self.steps: list[list[int]] = [[] for _ in lowered]
        for number, own in enumerate(self.operations):
            for position in own:
                self.steps[position].append(number)
        self._makers = {name: k for k, step in enumerate(steps) for name in step.place.writes}
        self._computed = {name: k for k, operation in enumerate(lowered) for name in operation.writes}

    def ends(self, producer: str, consumer: str, origin: Origin) -> tuple[int | None, int | None]:
        """Return the steps at the ends of an edge: the one of `producer`, and the one of `consumer`.

        Args:
            origin: the operation that asks for the consumer.
        """
        start = self._makers.get(producer, self._step_of(producer))
        readers = [k for k, step in enumerate(self._steps) if producer in step.place.reads]
        asking = [k for k in readers if origin in _origins(self._steps[k])]
        end = self._makers.get(consumer, self._step_of(consumer))
        return start, next(iter(asking or readers if end is None or end == start else [end]), None)

    def _step_of(self, name: str) -> int | None:
        """Return the first step that computes an operation's result, which it may not store."""
        operation = self._computed.get(name)
        return None if operation is None else next(iter(self.steps[operation]), None)


def _origins(step: KernelReport | ExternReport) -> tuple[Origin, ...]:
    return step.origins if isinstance(step, KernelReport) else (step.origin,)


__all__ = ["Edges"]
