"""Keeps the measured speeds of devices in the cache directory.

Input: a device's identity and what `fusion calibrate` measured on it; output: the same figures in later processes.  A
file that cannot be read, or that another version wrote, counts as absent: the device then has its assumed speeds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path

from fusion.codegen.cache import cache_dir, digest, publish
from fusion.lowering.errors import BuildError

VERSION = 3
"""Changes whenever the figures change their meaning."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The measured speeds of a device: of a GPU, or of one core of a CPU.

    Attributes:
        name: of the device.
        launch_us: microseconds of one launch.
        memory: bytes that a launch touches → bytes per microsecond, in ascending order of bytes.
        flops: additions of float32 per microsecond, in generated kernels.
        gemms: bytes of an element → the library's GEMMs, in operations per microsecond.
        products: bytes of an element → generated GEMMs of few rows, and of many, relative to the library's.
        costs: operation of float32 → its time in additions, in generated kernels.
    """

    name: str
    launch_us: float
    memory: Sequence[tuple[float, float]]
    flops: float
    gemms: dict[int, float]
    products: dict[int, tuple[float, float]] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)

    @property
    def shares(self) -> dict[int, float]:
        """The rates of the GEMMs, relative to those of 16-bit floats."""
        return {size: rate / self.gemms[2] for size, rate in self.gemms.items()}


def keep(figures: Figures, identity: str, threads: int = 0) -> Path:
    """Write the figures of a device; return their file.

    Args:
        identity: of the device.
        threads: of a CPU, that share its work.

    Raises:
        BuildError: the cache directory cannot be written.
    """
    path = _path(identity, threads)
    publish(path, json.dumps(asdict(figures), indent=1).encode())
    _kept.cache_clear()
    return path


def kept(identity: str, threads: int = 0) -> Figures | None:
    """Return the figures that were kept of a device; None if there are none."""
    return _kept(identity, threads, os.environ.get("FUSION_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME"))


def _path(identity: str, threads: int) -> Path:
    return cache_dir() / "devices" / f"{digest(str(VERSION), str(threads), identity)}.json"


@lru_cache
def _kept(identity: str, threads: int, chosen: str | None, home: str | None) -> Figures | None:
    """Return the figures in the cache directory that these variables of the environment choose."""
    try:
        read = json.loads(_path(identity, threads).read_text(encoding="utf-8"))
        figures = Figures(
            name=str(read["name"]),
            launch_us=float(read["launch_us"]),
            memory=tuple((float(touched), float(speed)) for touched, speed in read["memory"]),
            flops=float(read["flops"]),
            gemms={int(size): float(rate) for size, rate in read["gemms"].items()},
            products={int(size): (float(few), float(many)) for size, (few, many) in read["products"].items()},
            costs={str(name): float(cost) for name, cost in read["costs"].items()},
        )
    except (BuildError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    speeds = (figures.launch_us, figures.flops, *(speed for _, speed in figures.memory), *figures.gemms.values())
    speeds += (*chain.from_iterable(figures.products.values()), *figures.costs.values())
    return figures if figures.memory and 2 in figures.gemms and all(speed > 0 for speed in speeds) else None
