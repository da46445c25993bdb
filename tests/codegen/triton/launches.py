"""Stand-ins for tensors and binaries, as launchers see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion.codegen.triton.launch.direct import LoadedBinary
from fusion.codegen.triton.launch.launchers import BinaryRequirements


class At:
    """A tensor as a launcher sees it: a device and an address."""

    def __init__(self, address: int, device: int = 0) -> None:
        self.address, self.device = address, device

    def get_device(self) -> int:
        return self.device

    def data_ptr(self) -> int:
        return self.address


class Recorded:
    """Stands in for the binaries of a kernel: records the binaries that are prepared and the launches."""

    binary: LoadedBinary | None = None

    def __init__(self) -> None:
        self.built: list[tuple[object, ...]] = []
        self.launched: list[tuple[object, ...]] = []

    def wide(self, aligned: bool, sizes: Sequence[int]) -> bool:
        return max(sizes) > 1000

    def run(self, wanted: BinaryRequirements) -> tuple[Callable[[int, list[int]], None], LoadedBinary | None]:
        self.built.append((wanted.aligned, *wanted.multiples, *(["wide"] if wanted.wide else [])))
        return lambda programs, args: self.launched.append((wanted.aligned, programs, *args)), self.binary

    def programs(self, wanted: BinaryRequirements, sizes: Sequence[int]) -> int:
        return 7 if wanted.aligned else 9
