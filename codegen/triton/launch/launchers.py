"""Launchers: what is called with tensors and sizes, and finds the binary that these want.

What enters is what makes binaries ready (`build`); what leaves is a launcher.  An ordinary launch, of aligned tensors
on the current device, is one call (`direct`) from the second one on.  All others, and the first, look up by device,
alignment and sizes what they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Protocol

import torch

from fusion.codegen.target import Launcher, Refused
from fusion.codegen.triton.arguments import on_device
from fusion.codegen.triton.launch.counters import Run
from fusion.codegen.triton.launch.direct import Binary, Launch, launch_of
from fusion.codegen.triton.launch.multiples import ALIGNED, telling
from fusion.codegen.triton.products.stacked import NEAR
from fusion.lowering.errors import BuildError
from fusion.lowering.kernel import Kernel, Param

MOST_SIZES = 4096
"""Sets of sizes for which a launcher remembers what it launches."""


class Wanted(NamedTuple):
    """What a binary is to be for.

    Attributes:
        device: its number.
        aligned: pointers are as promised.
        wide: sizes are beyond what the kernel is generated for as a rule, and indices 64 bits wide.
        multiples: which sizes are multiples of 16.
    """

    device: int
    aligned: bool = True
    wide: bool = False
    multiples: tuple[bool, ...] = ()


class Ready(Protocol):
    """What has the binaries of one kernel, or makes them."""

    def wide(self, aligned: bool, sizes: Sequence[int]) -> bool:
        """Are these sizes beyond what the kernel is generated for as a rule?"""

    def run(self, wanted: Wanted) -> tuple[Run, Binary | None]:
        """What launches, and the binary if addresses and sizes are all that it takes; raises a BuildError."""

    def programs(self, wanted: Wanted, sizes: Sequence[int]) -> int:
        """How many programs run."""


class Either:
    """A launcher that raises where a launch is refused, and gives others that do something else then."""

    def __init__(self, launcher: Callable[[Refused | None], Launcher]) -> None:
        self._launcher = launcher
        self._raises: Launcher | None = None

    def __call__(self, *args: Any) -> None:
        if self._raises is None:
            self._raises = self._launcher(None)
        self._raises(*args)

    def or_else(self, refused: Refused | None) -> Launcher:
        """What launches, and calls `refused` where that cannot be."""
        return self._launcher(refused)


def launcher(ready: Ready, kernel: Kernel, refused: Refused | None = None, *, near: bool = False) -> Launcher:
    """What launches `kernel`, and calls `refused`, if there is one, where that cannot be.

    Args:
        near: are tensors to lie near each other?
    """
    looked_up = _Found(ready, kernel, refused, near=near)
    return _of_sizes(looked_up, kernel) if kernel.sizes else looked_up.of(())


class _Found:
    """Launches of one kernel that look up what they run."""

    def __init__(self, ready: Ready, kernel: Kernel, refused: Refused | None, *, near: bool) -> None:
        self._ready, self._kernel, self._refused, self._near = ready, kernel, refused, near
        self._runs: dict[tuple[int, ...], tuple[Run, int]] = {}  # by device, alignment and sizes
        self._told = telling(kernel)

    def of(self, sizes: tuple[int, ...]) -> Launcher:
        """What launches tensors with these sizes."""
        kernel, runs, refused, first = self._kernel, self._runs, self._refused, self._first
        current, kept = torch._C._cuda_getDevice, promise(kernel.params, near=self._near)
        at, values = on_device(kernel), _values_of(kernel.params)

        def launch(*tensors: Any) -> None:
            device, pointers = tensors[at].get_device(), values(tensors)
            aligned = kept(pointers)
            found = runs.get((device, aligned, *sizes))
            if found is None:
                try:
                    found = first(device, aligned, sizes, direct)
                except BuildError as refusal:
                    if refused is None:
                        raise
                    return refused(refusal, (*tensors, *sizes))
            run, programs = found
            if device == current():
                run(programs, [*pointers, *sizes])
            else:
                with torch.cuda.device(device):
                    run(programs, [*pointers, *sizes])

        direct = None if self._near else launch_of(kernel, launch)
        return launch if direct is None else direct

    def _first(self, device: int, aligned: bool, sizes: tuple[int, ...], direct: Launch | None) -> tuple[Run, int]:
        """What is to be run, which `direct` does from here on if tensors and sizes are all that it takes."""
        asked = device, aligned, *sizes
        wide = bool(sizes) and self._ready.wide(aligned, sizes)
        multiples = tuple([tells and size % ALIGNED == 0 for tells, size in zip(self._told, sizes, strict=True)])
        wanted = Wanted(device, aligned, wide, multiples)
        (run, binary), programs = self._ready.run(wanted), self._ready.programs(wanted, sizes)
        if aligned and direct is not None and binary is not None:
            direct.ready(device, binary.prepared(programs), sizes, binary.counters)
        if len(self._runs) >= MOST_SIZES:
            self._runs.clear()
        self._runs[asked] = run, programs
        return run, programs


def _of_sizes(looked_up: _Found, kernel: Kernel) -> Launcher:
    """What launches with sizes behind the tensors; those that were there before cost no more than fixed ones."""
    known: dict[tuple[int, ...], Launcher] = {}
    count = len(kernel.params)

    def launch(*args: Any) -> None:
        sizes = args[count:]
        found = known.get(sizes)
        if found is None:
            if len(known) >= MOST_SIZES:
                known.clear()
            found = known[sizes] = looked_up.of(sizes)
        found(*args[:count])

    return launch


def promise(params: Sequence[Param], *, near: bool = False) -> Callable[[Sequence[int]], bool]:
    """Says of the pointers of a launch whether all that should be multiples of 16 are; and `near` each other."""
    tensors = [position for position, param in enumerate(params) if not param.number]
    if len(tensors) < len(params):
        check = promise([params[position] for position in tensors], near=near)
        return lambda given: check([given[position] for position in tensors])
    promised = [position for position, param in enumerate(params) if param.aligned]

    def kept(pointers: Sequence[int]) -> bool:
        return not reduce(or_, pointers, 0) & 15 or not any(pointers[position] & 15 for position in promised)

    def kept_near(pointers: Sequence[int]) -> bool:
        return kept(pointers) and max(pointers) - min(pointers) < NEAR

    return kept_near if near else kept


def _values_of(params: Sequence[Param]) -> Callable[[Sequence[torch.Tensor]], list[Any]]:
    """Gives what is passed for tensors of these parameters, of which some are numbers."""
    if not any(param.number for param in params):
        return lambda tensors: [tensor.data_ptr() for tensor in tensors]
    takes = [torch.Tensor.item if param.number else torch.Tensor.data_ptr for param in params]
    return lambda tensors: [take(tensor) for take, tensor in zip(takes, tensors, strict=True)]
