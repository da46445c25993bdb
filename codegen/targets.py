"""The list of targets: which one serves which device."""

from __future__ import annotations

import threading
from collections.abc import Callable

from codegen.build import Builder
from codegen.target import Target
from lowering.errors import Unsupported


def _triton() -> Target:
    from codegen.triton import TritonTarget

    return TritonTarget()


def _c() -> Target:
    from codegen.c import CTarget

    return CTarget()


def _reference() -> Target:
    from codegen.reference import ReferenceTarget

    return ReferenceTarget()


TARGETS: dict[str, Callable[[], Target]] = {"triton": _triton, "c": _c, "reference": _reference}
"""Target name → constructor.  Imported on first use: no target is needed to use another."""

DEFAULTS = {"cuda": "triton", "cpu": "c"}
"""Device type → the target that serves it unless the user names another."""

_builders: dict[str, Builder] = {}
_lock = threading.Lock()


def builder_for(device_type: str, name: str | None = None) -> Builder:
    """The builder (and with it the target) for tensors of `device_type`; `name` picks one other than the default.

    Raises:
        Unsupported: no target serves this device.
    """
    chosen = name or DEFAULTS.get(device_type)
    if chosen is None:
        raise Unsupported(
            f"no target generates code for {device_type!r} tensors", hint=f"supported devices: {sorted(DEFAULTS)}"
        )
    with _lock:
        if chosen not in _builders:
            _builders[chosen] = Builder(TARGETS[chosen]())
        return _builders[chosen]
