"""Plans which launches in a row are saved as one step.

Input: a spliced module; output: the module, in which launches in a row are calls of a `PlannedSequence`, and the JSON
of such a call, which `sequences.py` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import torch
from torch import fx

from fusion.artifact.manifest import PartEntry, SequenceEntry, SequenceLaunch
from fusion.artifact.values import written
from fusion.lowering.ir.kernel import Kernel
from fusion.runtime.sequence_calls import Part, Places
from fusion.runtime.sequences import joined_by
from fusion.runtime.splice import LAUNCH, lines_of
from fusion.schedule.kernels import KernelCall


class PlannedSequence:
    """Stands for the call of some launches in a module that is saved, and is never called.

    Args:
        launches: in order.
        places: of the tensors of each.
        size: bytes of the workspace.
    """

    def __init__(self, launches: Sequence[KernelCall], places: Places, size: int) -> None:
        self._launches, self._places, self._size = launches, places, size

    def __call__(self, *tensors: torch.Tensor) -> NoReturn:
        raise AssertionError("it is saved, not called")

    def entry(self, kernels: Mapping[Kernel, int]) -> SequenceEntry:
        """Return the form in the file.

        Args:
            kernels: kernel → its number.
        """
        launches = [
            SequenceLaunch(
                kernel=kernels[call.kernel], lines=[*lines_of(call)], places=[_written_place(place) for place in of]
            )
            for call, of in zip(self._launches, self._places, strict=True)
        ]
        return {"launches": launches, "workspace": self._size}


def in_sequences(module: fx.GraphModule, kernels: Collection[Kernel]) -> fx.GraphModule:
    """Return a module for a CPU in which launches of `kernels` in a row are calls of a `PlannedSequence`."""

    def launches(node: fx.Node) -> bool:
        call = node.meta.get(LAUNCH)
        return isinstance(call, KernelCall) and call.kernel in kernels and not call.kernel.sizes

    def planned(nodes: Sequence[fx.Node], places: Places, size: int) -> PlannedSequence:
        return PlannedSequence([node.meta[LAUNCH] for node in nodes], places, size)

    return joined_by(module, launches, planned)


def _written_place(place: int | Part) -> int | PartEntry:
    if isinstance(place, int):
        return place
    dtype = written(place.dtype, lambda value: None)
    entry: PartEntry = {"begin": place.begin, "shape": [*place.shape], "strides": [*place.strides], "dtype": dtype}
    return entry if place.of is None else {**entry, "of": place.of}


__all__ = ["PlannedSequence", "in_sequences"]
