"""Lists the targets: which one serves which device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from fusion.codegen.build import KernelBuilder
from fusion.codegen.c.target import CTarget
from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.target import Target
from fusion.codegen.tuning import Tuner
from fusion.lowering.errors import Unsupported


def _triton(arch: str | None = None, numerics: Numerics = DEFAULT) -> Target:
    try:
        from fusion.codegen.triton import TritonTarget
    except ModuleNotFoundError as error:
        raise Unsupported(f"the triton target cannot be used: {error}", hint="install the package triton") from error
    return TritonTarget(arch, numerics)


def _c(arch: str | None = None, numerics: Numerics = DEFAULT) -> Target:
    _no_choice("c", arch)
    return CTarget(numerics)


def _reference(arch: str | None = None, numerics: Numerics = DEFAULT) -> Target:
    _no_choice("reference", arch)
    return ReferenceTarget(numerics)


def _no_choice(name: str, arch: str | None) -> None:
    if arch is not None:
        raise Unsupported(f"the {name} target builds for this machine only, not for {arch!r}", hint="leave arch out")


TARGETS: dict[str, Callable[..., Target]] = {"triton": _triton, "c": _c, "reference": _reference}
"""Target name → constructor, which takes an architecture (or None for the one at hand) and numerics.  Imported on
first use: no target is needed to use another."""

DEFAULTS = {"cuda": "triton", "cpu": "c"}
"""Device type → its default target."""

_builders: dict[tuple[str, Numerics], KernelBuilder] = {}
_lock = threading.Lock()


_tuners: dict[tuple[KernelBuilder, torch.device], Tuner] = {}


def tuner_for(device: torch.device, builder: KernelBuilder) -> Tuner:
    """Return the tuner that picks the fastest configurations on `device` for kernels of `builder`."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        return _tuners.setdefault((builder, device), Tuner(builder, device))


def prepare(device_type: str) -> None:
    """Start the build tools of the target of `device_type` ahead of the first build."""
    TARGETS[DEFAULTS[device_type]]().prepare()


def builder_for(device_type: str, name: str | None = None, numerics: Numerics = DEFAULT) -> KernelBuilder:
    """Return the builder (and with it the target) for tensors of `device_type`; `name` overrides the default target.

    Raises:
        Unsupported: no target serves this device.
    """
    chosen = name or DEFAULTS.get(device_type)
    if chosen is None:
        raise Unsupported(
            f"no target generates code for {device_type!r} tensors",
            hint=f"supported devices: {', '.join(sorted(DEFAULTS))}",
        )
    with _lock:
        key = chosen, numerics
        if key not in _builders:
            _builders[key] = KernelBuilder(TARGETS[chosen](None, numerics))
            _builders[key].target.prepare()
        return _builders[key]
