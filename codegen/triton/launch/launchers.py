"""Launches kernels on tensors and sizes, with the binary that was compiled for these.

Input: an object that prepares binaries (`build`); output: a launcher.  A usual launch, of aligned tensors on the
current device, is one call (`direct`) from the second one on.  All others, and the first, look up their binary by
device, alignment and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Protocol

import torch

from fusion.codegen.target import Launcher, OnRefusedLaunch
from fusion.codegen.triton.arguments import on_device
from fusion.codegen.triton.launch.counters import Run
from fusion.codegen.triton.launch.direct import DirectLaunch, LoadedBinary, launch_of
from fusion.codegen.triton.launch.multiples import ALIGNED, sizes_that_matter
from fusion.codegen.triton.products.stacked import DESCRIPTOR_REACH
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel, Param

MOST_SIZES = 4096
"""Sets of sizes for which a launcher caches its launches."""


class BinaryRequirements(NamedTuple):
    """The requirements of a binary.

    Attributes:
        device: the number of the device.
        aligned: pointers have the declared alignment.
        wide: sizes exceed the limit of the default source, and indices have 64 bits.
        multiples: for each size, whether it is known to be a multiple of 16.
    """

    device: int
    aligned: bool = True
    wide: bool = False
    multiples: tuple[bool, ...] = ()


class Ready(Protocol):
    """The binaries of one kernel, compiled when first needed."""

    def wide(self, aligned: bool, sizes: Sequence[int]) -> bool:
        """Return whether these sizes exceed the limit of the default source."""

    def run(self, wanted: BinaryRequirements) -> tuple[Run, LoadedBinary | None]:
        """Return the function that launches, and the binary if it takes only addresses and sizes; or raise a
        BuildError.
        """

    def programs(self, wanted: BinaryRequirements, sizes: Sequence[int]) -> int:
        """Return the number of programs."""


class Either:
    """A launcher that raises if a launch is refused, or returns launchers that call something else then."""

    def __init__(self, launcher: Callable[[OnRefusedLaunch | None], Launcher]) -> None:
        self._launcher = launcher
        self._raises: Launcher | None = None

    def __call__(self, *args: Any) -> None:
        if self._raises is None:
            self._raises = self._launcher(None)
        self._raises(*args)

    def or_else(self, refused: OnRefusedLaunch | None) -> Launcher:
        """Return a launcher that calls `refused` if it cannot launch."""
        return self._launcher(refused)


def launcher(ready: Ready, kernel: Kernel, refused: OnRefusedLaunch | None = None, *, near: bool = False) -> Launcher:
    """Return a launcher of `kernel` that calls `refused`, if there is one, where it cannot launch.

    Args:
        near: must tensors be near each other in memory?
    """
    launches = _Launches(ready, kernel, refused, near=near)
    return _of_sizes(launches, kernel) if kernel.sizes else launches.of(())


class _Launches:
    """Launches of one kernel, which look up their binaries."""

    def __init__(self, ready: Ready, kernel: Kernel, refused: OnRefusedLaunch | None, *, near: bool) -> None:
        self._ready, self._kernel, self._refused, self._near = ready, kernel, refused, near
        self._runs: dict[tuple[int, ...], tuple[Run, int]] = {}  # by device, alignment and sizes
        self._relevant = sizes_that_matter(kernel)

    def of(self, sizes: tuple[int, ...]) -> Launcher:
        """Return a launcher of tensors with these sizes."""
        kernel, runs, refused, first = self._kernel, self._runs, self._refused, self._first
        current, is_aligned = torch._C._cuda_getDevice, promise(kernel.params, near=self._near)
        at, values = on_device(kernel), _values_of(kernel.params)

        def launch(*tensors: Any) -> None:
            device, pointers = tensors[at].get_device(), values(tensors)
            aligned = is_aligned(pointers)
            entry = runs.get((device, aligned, *sizes))
            if entry is None:
                try:
                    entry = first(device, aligned, sizes, direct)
                except BuildError as refusal:
                    if refused is None:
                        raise
                    return refused(refusal, (*tensors, *sizes))
            run, programs = entry
            if device == current():
                run(programs, [*pointers, *sizes])
            else:
                with torch.cuda.device(device):
                    run(programs, [*pointers, *sizes])

        direct = None if self._near else launch_of(kernel, launch)
        return launch if direct is None else direct

    def _first(
        self, device: int, aligned: bool, sizes: tuple[int, ...], direct: DirectLaunch | None
    ) -> tuple[Run, int]:
        """Return the run of a first launch, which `direct` performs from here on if it takes only tensors and sizes."""
        key = device, aligned, *sizes
        wide = bool(sizes) and self._ready.wide(aligned, sizes)
        multiples = tuple(
            [matters and size % ALIGNED == 0 for matters, size in zip(self._relevant, sizes, strict=True)]
        )
        wanted = BinaryRequirements(device, aligned, wide, multiples)
        (run, binary), programs = self._ready.run(wanted), self._ready.programs(wanted, sizes)
        if aligned and direct is not None and binary is not None:
            direct.ready(device, binary.prepared(programs), sizes, binary.counters)
        if len(self._runs) >= MOST_SIZES:
            self._runs.clear()
        self._runs[key] = run, programs
        return run, programs


def _of_sizes(launches: _Launches, kernel: Kernel) -> Launcher:
    """Return a launcher with sizes after the tensors; known ones cost no more than fixed ones."""
    known: dict[tuple[int, ...], Launcher] = {}
    count = len(kernel.params)

    def launch(*args: Any) -> None:
        sizes = args[count:]
        launcher = known.get(sizes)
        if launcher is None:
            if len(known) >= MOST_SIZES:
                known.clear()
            launcher = known[sizes] = launches.of(sizes)
        launcher(*args[:count])

    return launch


def promise(params: Sequence[Param], *, near: bool = False) -> Callable[[Sequence[int]], bool]:
    """Return a check of the pointers of a launch: all that the kernel declares aligned are, and if `near`, near each
    other.
    """
    tensors = [position for position, param in enumerate(params) if not param.number]
    if len(tensors) < len(params):
        check = promise([params[position] for position in tensors], near=near)
        return lambda values: check([values[position] for position in tensors])
    promised = [position for position, param in enumerate(params) if param.aligned]

    def is_aligned(pointers: Sequence[int]) -> bool:
        return not reduce(or_, pointers, 0) & 15 or not any(pointers[position] & 15 for position in promised)

    def is_aligned_and_near(pointers: Sequence[int]) -> bool:
        return is_aligned(pointers) and max(pointers) - min(pointers) < DESCRIPTOR_REACH

    return is_aligned_and_near if near else is_aligned


def _values_of(params: Sequence[Param]) -> Callable[[Sequence[torch.Tensor]], list[Any]]:
    """Return a function from tensors to the values that are passed, where some parameters are numbers."""
    if not any(param.number for param in params):
        return lambda tensors: [tensor.data_ptr() for tensor in tensors]
    takes = [torch.Tensor.item if param.number else torch.Tensor.data_ptr for param in params]
    return lambda tensors: [take(tensor) for take, tensor in zip(takes, tensors, strict=True)]
