"""Matrix units: what `tl.dot` takes on a device, and in which precision."""

from __future__ import annotations

import torch

from fusion.codegen.triton.devices import Device, Feature


def on_matrix_units(dtype: torch.dtype, device: Device) -> bool:
    """Has `tl.dot` an instruction for operands of `dtype`?"""
    if dtype is torch.float64:
        return device.has(Feature.FLOAT64_UNITS)
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8)


def input_precision(device: Device, tf32: bool) -> str:
    """How `tl.dot` takes float32 operands: rounded if that is allowed, else split in two, else one by one.

    >>> from fusion.codegen.triton.devices import device_of
    >>> [input_precision(device_of(arch), False) for arch in ("sm_90", "sm_75", "gfx942")]
    ['tf32x3', 'ieee', 'ieee']
    """
    if tf32:
        return "tf32"
    return "tf32x3" if device.has(Feature.TF32) else "ieee"
