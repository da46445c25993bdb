"""Matrix units: what `tl.dot` takes on an architecture, in which precision, and the shared memory it is fed from."""

from __future__ import annotations

import torch

from fusion.codegen.triton.architecture import capability

SHARED_MEMORY = {"sm_80": 163_840, "sm_86": 101_376, "sm_89": 101_376, "gfx942": 65_536}
"""Bytes of shared memory that one program may use; newer NVIDIA architectures have `_SHARED_MEMORY_NEW`."""
_SHARED_MEMORY_NEW = 232_448


def shared_memory(arch: str) -> int:
    """Bytes of shared memory that one program may use on `arch`."""
    return SHARED_MEMORY.get(arch, _SHARED_MEMORY_NEW if arch.startswith("sm_") else SHARED_MEMORY["gfx942"])


def on_matrix_units(dtype: torch.dtype, arch: str) -> bool:
    """Has `tl.dot` an instruction for operands of `dtype`?"""
    if dtype is torch.float64:
        return arch.startswith("sm_")
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8)


def input_precision(arch: str, tf32: bool) -> str:
    """How `tl.dot` takes float32 operands: rounded if that is allowed, else split in two, else one by one.

    >>> input_precision("sm_90", False), input_precision("sm_75", False), input_precision("gfx942", False)
    ('tf32x3', 'ieee', 'ieee')
    """
    if tf32:
        return "tf32"
    return "tf32x3" if capability(arch) >= 80 else "ieee"
