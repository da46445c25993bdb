"""Keeps the measured speeds of devices in the cache directory.

Input: a device's identity and the figures that `fusion calibrate` measured; output: the same figures in later
processes.  An entry that is damaged, or that another version wrote, counts as absent: the device then has its assumed
speeds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from fusion.codegen.cache import Damaged, cache_dir, digest, get, put
from fusion.lowering.errors import BuildError

VERSION = 6
"""Changes whenever the figures change their meaning."""


@dataclass(frozen=True, slots=True)
class DeviceSpeeds:
    """The measured speeds of a device: of a GPU, or of one core of a CPU.

    Attributes:
        name: of the device.
        launch_us: microseconds of one launch.
        memory: bytes that a launch touches → bytes per microsecond, in ascending order of bytes.
        flops: additions of float32 per microsecond, in generated kernels.
        gemms: bytes of an element → the library's GEMMs, in operations per microsecond.
        products: bytes of an element → generated GEMMs, relative to the library's.
        costs: operation of float32 → its time in additions, in generated kernels.
    """

    name: str
    launch_us: float
    memory: Sequence[tuple[float, float]]
    flops: float
    gemms: dict[int, float]
    products: dict[int, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)

    @property
    def shares(self) -> dict[int, float]:
        """The rates of the GEMMs, relative to 16-bit floats."""
        return {size: rate / self.gemms[2] for size, rate in self.gemms.items()}


def keep(figures: DeviceSpeeds, identity: str, threads: int = 0) -> Path:
    """Write the figures of a device; return their file.

    Args:
        identity: of the device.
        threads: of a CPU, that share its work.

    Raises:
        BuildError: the cache directory cannot be written.
    """
    name = _name(identity, threads)
    put("devices", name, json.dumps(asdict(figures), indent=1).encode() + b"\n")
    _kept.cache_clear()
    return cache_dir() / "devices" / name


def kept(identity: str, threads: int = 0) -> DeviceSpeeds | None:
    """Return the figures that were kept of a device; None if there are none."""
    return _kept(identity, threads, os.environ.get("FUSION_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME"))


def _name(identity: str, threads: int) -> str:
    return f"{digest(str(VERSION), str(threads), identity)}.json"


@lru_cache
def _kept(identity: str, threads: int, chosen: str | None, home: str | None) -> DeviceSpeeds | None:
    """Return the figures in the cache directory that these variables of the environment choose."""
    try:
        kept = get("devices", _name(identity, threads))
        return None if kept is None else _figures(kept)
    except (BuildError, Damaged):
        return None


def _figures(content: bytes) -> DeviceSpeeds:
    """Return the figures of an entry.

    Raises:
        Damaged: it holds something else.
    """
    try:
        read = json.loads(content)
        figures = DeviceSpeeds(
            name=str(read["name"]),
            launch_us=float(read["launch_us"]),
            memory=tuple((float(touched), float(speed)) for touched, speed in read["memory"]),
            flops=float(read["flops"]),
            gemms={int(size): float(rate) for size, rate in read["gemms"].items()},
            products={int(size): float(share) for size, share in read["products"].items()},
            costs={str(name): float(cost) for name, cost in read["costs"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged from error
    speeds = (figures.launch_us, figures.flops, *(speed for _, speed in figures.memory), *figures.gemms.values())
    speeds += (*figures.products.values(), *figures.costs.values())
    if not figures.memory or 2 not in figures.gemms or not all(0 < speed < math.inf for speed in speeds):
        raise Damaged
    return figures
