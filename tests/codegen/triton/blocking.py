"""Kernels over block dimensions for the device whose decisions tests hold."""

from __future__ import annotations

from fusion.codegen.triton import blocks
from fusion.codegen.triton.blocks import Blocked
from fusion.codegen.triton.devices import H200, Device
from fusion.lowering.ir.kernel import Kernel


def block(kernel: Kernel, device: Device = H200) -> Blocked:
    """A kernel over block dimensions, for an H200 unless another device is named."""
    return blocks.block(kernel, device)
