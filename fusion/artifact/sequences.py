"""Reads launches in a row that were saved as one step: one call of C for all of them, as in the process that compiled.

Input: the JSON of the step, and launchers; output: a callable (`runtime.sequence_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from fusion.artifact.manifest import PartEntry, SequenceEntry
from fusion.artifact.values import read
from fusion.codegen.c.calls import entry_of
from fusion.codegen.c.sequence import InSequence
from fusion.runtime.located import failing, located
from fusion.runtime.sequence_calls import NativeLaunch, Part, Places, call_of, native_call


def sequence_of(
    entry: SequenceEntry, launchers: Sequence[Callable[..., object]], function: InSequence | None
) -> Callable[..., None]:
    """Return the call of a saved sequence.

    Args:
        launchers: of all kernels of the program.
        function: launches sequences; None if there is none for this machine.
    """
    places: Places = [[_place(place) for place in launch["places"]] for launch in entry["launches"]]
    chosen = [(launchers[launch["kernel"]], launch["lines"]) for launch in entry["launches"]]
    native = [NativeLaunch(of, failing(of, lines)) for launch, lines in chosen if (of := entry_of(launch)) is not None]
    call = native_call(native, places, entry["workspace"], function if len(native) == len(chosen) else None)
    return call or call_of([located(launch, lines) for launch, lines in chosen], places, entry["workspace"])


def _place(place: int | PartEntry) -> int | Part:
    if isinstance(place, int):
        return place
    dtype = cast("torch.dtype", read(place["dtype"]))
    return Part(place["begin"], tuple(place["shape"]), tuple(place["strides"]), dtype, place.get("of"))


__all__ = ["sequence_of"]
