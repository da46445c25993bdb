"""Lists the GPUs for which code is generated, as values, and finds the one of an architecture or a machine.

One file per known device.  An architecture without one derives from the known device of the nearest compute capability,
with the published limits of its own.  A device of this machine that is another model than the known one of its
architecture has its own properties, and the known one's speeds per multiprocessor.

Each file names the document and the table that publish its specifications, with which the figures were compared: guides
and documentation pages themselves, data sheets and white papers as other public documents quote them.  Only the H200
was measured: prices for the others are estimates.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import torch

from fusion.codegen import calibration
from fusion.codegen.triton.devices.a100 import A100
from fusion.codegen.triton.devices.b200 import B200
from fusion.codegen.triton.devices.derived import speeds
from fusion.codegen.triton.devices.device import WARP_SPECIALISED, Device, Feature, PersistentShape, Speeds
from fusion.codegen.triton.devices.h200 import H200
from fusion.codegen.triton.devices.mi300 import MI300
from fusion.codegen.triton.devices.rtx30 import RTX30
from fusion.codegen.triton.devices.rtx40 import RTX40
from fusion.codegen.triton.devices.rtx50 import RTX50
from fusion.lowering.errors import BuildError

KNOWN = {device.arch: device for device in (A100, RTX30, RTX40, H200, B200, RTX50, MI300)}
"""The known device of each architecture."""

_LIMITS = {
    70: (96, 96, 2048, 2),
    72: (96, 96, 2048, 2),
    75: (64, 64, 1024, 32),
    87: (163, 164, 1536, 64),
    103: (227, 228, 2048, 64),
    110: (227, 228, 1536, 64),
}
"""For a compute capability, times ten: KiB of shared memory of a program and of a multiprocessor, threads of a
multiprocessor, and how many times as fast float32 is as float64.

CUDA Programming Guide 13, "Compute Capabilities", Tables 30 and 31; for 7.0 and 7.2, which it no longer lists, CUDA C++
Programming Guide 11, "Technical Specifications per Compute Capability" and "Throughput of Native Arithmetic
Instructions".
"""

_LDS = {"gfx950": 160}
"""KiB of LDS of a compute unit of AMD architectures where it is not 64: ROCm documentation, "AMD GPU specifications".
"""

ARCHITECTURES = (
    *(f"sm_{each}" for each in (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)),
    *("gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102"),
    *("gfx1150", "gfx1151", "gfx1200", "gfx1201", "gfx1250"),
)
"""The architectures that can be named: the ones that the assemblers of Triton 3.6 support."""

_SINCE = {
    75: frozenset({Feature.PTX}),
    80: frozenset({Feature.PTX, Feature.HALF_PAIRS, Feature.TF32, Feature.FLOAT64_UNITS, Feature.ASYNC_COPIES}),
}
"""Features of architectures below the first known device, by the highest compute capability, times ten, they hold for.
"""

_TOLERANCE = 0.05
"""By how much the measured bandwidth of the same model may differ from the published one."""


def capability(arch: str) -> int:
    """Return the compute capability of an NVIDIA architecture, times ten; 0 for any other.

    >>> capability("sm_90a"), capability("sm_120"), capability("gfx942")
    (90, 120, 0)
    """
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    return int(match[1]) if match else 0


def checked(arch: str) -> str:
    """Return the name of an architecture, such as "sm_90", "sm_90a" or "gfx942".

    Raises:
        BuildError: there is none of this name.

    >>> checked("sm_90a")
    'sm_90a'
    """
    has_variants = capability(arch) >= 90
    known = (*KNOWN, *ARCHITECTURES)
    if arch not in known and not (has_variants and arch[:-1] in known):
        raise BuildError(f"unknown architecture {arch!r}", hint=f"known: {', '.join(ARCHITECTURES)}")
    return arch


@lru_cache
def device_of(arch: str) -> Device:
    """Return the device that stands for an architecture.

    >>> device_of("sm_120").shared_per_program, device_of("sm_75").shared_per_program, device_of("gfx1100").warp
    (101376, 65536, 32)

    Raises:
        BuildError: no such architecture.
    """
    if arch in KNOWN:
        return KNOWN[arch]
    if arch.startswith("gfx"):
        room = _LDS.get(arch, 64) << 10
        warp = 64 if arch.startswith("gfx9") else 32
        return replace(MI300, arch=arch, name=arch, shared_per_program=room, shared_per_multiprocessor=room, warp=warp)
    number = capability(arch)
    if number < min(_LIMITS):
        raise BuildError(f"unknown architecture {arch!r}", hint='name one like "sm_90" or "gfx942"')
    known = {capability(device.arch): device for device in KNOWN.values() if capability(device.arch)}
    nearest = known[max((each for each in known if each <= number), default=min(known))]
    if capability(nearest.arch) == number:  # sm_90a
        return replace(nearest, arch=arch)
    derived = replace(nearest, arch=arch, name=arch)
    if number in _LIMITS:
        room, shared, threads, ratio = _LIMITS[number]
        derived = replace(
            derived,
            shared_per_program=room << 10,
            shared_per_multiprocessor=shared << 10,
            threads_per_multiprocessor=threads,
            matrix={**derived.matrix, 8: derived.flops / ratio},
        )
    features = next((features for most, features in _SINCE.items() if number <= most), derived.features)
    return replace(derived, features=features, measured=None)


@lru_cache
def device_at(index: int) -> Device:
    """Return the CUDA or ROCm device with this index, as PyTorch numbers them."""
    properties = torch.cuda.get_device_properties(index)
    shared = properties.shared_memory_per_block
    if torch.version.hip is None:
        shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # its stub lacks it
    bandwidth = 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8 / 1e6
    device = like(
        device_of(arch_at(index)),
        name=properties.name,
        multiprocessors=properties.multi_processor_count,
        shared=shared,
        cache=properties.L2_cache_size,
        bandwidth=bandwidth,
    )
    figures = calibration.kept(properties.name)
    return device if figures is None else calibrated(device, figures)


def calibrated(device: Device, figures: calibration.DeviceSpeeds) -> Device:
    """Return a device with the speeds that `fusion calibrate` measured; generated kernels keep their shares of them.

    The rate of additions is the published one, which costs are relative to: a kernel of additions is slower by
    the time that its memory takes.
    """
    known = speeds(device)
    measured = replace(
        known,
        launch_us=figures.launch_us,
        bandwidth=figures.memory[-1][1],
        matrix_flops=figures.gemms[2],
        matrix_share={**known.matrix_share, **figures.shares},
    )
    return replace(device, measured=measured)


def like(known: Device, *, name: str, multiprocessors: int, shared: int, cache: int, bandwidth: float) -> Device:
    """Return a device of the architecture of `known` with these properties; `known` itself if they are its own.

    Its speed per multiprocessor is `known`'s; 0 stands for a property that the driver does not report.
    """
    bandwidth, shared = bandwidth or known.bandwidth, shared or known.shared_per_program
    same = abs(bandwidth / known.bandwidth - 1) < _TOLERANCE and shared == known.shared_per_program
    if same and multiprocessors == known.multiprocessors:
        return known
    share, bandwidth_share = multiprocessors / known.multiprocessors, bandwidth / known.bandwidth
    measured = None if known.measured is None else _scaled(known.measured, share, bandwidth_share)
    return replace(
        known,
        name=name,
        multiprocessors=multiprocessors,
        shared_per_program=shared,
        shared_per_multiprocessor=max(shared, known.shared_per_multiprocessor),
        cache=cache or known.cache,
        bandwidth=bandwidth,
        flops=known.flops * share,
        matrix={size: rate * share for size, rate in known.matrix.items()},
        measured=measured,
    )


def _scaled(known: Speeds, share: float, bandwidth_share: float) -> Speeds:
    """Return speeds scaled by a share of the multiprocessors and a share of the bandwidth."""
    return replace(
        known,
        bandwidth=known.bandwidth * bandwidth_share,
        cache_bandwidth=known.cache_bandwidth * share,
        flops=known.flops * share,
        matrix_flops=known.matrix_flops * share,
    )


def arch_at(index: int) -> str:
    """Return the architecture of the CUDA or ROCm device of that number, without Triton's driver."""
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(index).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


__all__ = [
    "H200",
    "KNOWN",
    "WARP_SPECIALISED",
    "Device",
    "Feature",
    "PersistentShape",
    "arch_at",
    "capability",
    "checked",
    "device_at",
    "device_of",
    "like",
    "speeds",
]
