"""Matrix units: the operands of `tl.dot` on a device, and its precision."""

from __future__ import annotations

import torch

from fusion.codegen.triton.devices import Device, Feature


def on_matrix_units(dtype: torch.dtype, device: Device) -> bool:
    """Does `tl.dot` have an instruction for operands of `dtype`?"""
    if dtype is torch.float64:
        return device.has(Feature.FLOAT64_UNITS)
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8)


def input_precision(device: Device, tf32: bool) -> str:
    """Return the precision of `tl.dot` for float32: rounded if allowed, else split in two, else exact.

    >>> from fusion.codegen.triton.devices import device_of
    >>> [input_precision(device_of(arch), False) for arch in ("sm_90", "sm_75", "gfx942")]
    ['tf32x3', 'ieee', 'ieee']
    """
    if tf32:
        return "tf32"
    return "tf32x3" if device.has(Feature.TF32) else "ieee"
