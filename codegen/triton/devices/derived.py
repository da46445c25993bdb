"""Derives the speeds of a device that was not measured.

Input: its specifications; output: its `Speeds`.  It is assumed to reach the same share of each published rate as an
H200; speeds that depend on how the matrix units get their operands follow from the kind of the units.  Shares of
attention, and the time of epilogues, are an H200's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fusion.codegen.triton.devices.device import (
    WARP_SPECIALISED,
    Device,
    Feature,
    PersistentSpeeds,
    ProductSpeeds,
    Speeds,
)
from fusion.codegen.triton.devices.h200 import H200

_POINTERS = 0.95
"""The share of the library's speed where its kernels, too, feed the matrix units from registers (`mma.sync`, MFMA):
Triton's tutorial on matrix products shows the library's speed on an A100; less the loss on unaligned shapes.
"""


def speeds(device: Device) -> Speeds:
    """Return the measured speeds of a device, or those derived from its specifications."""
    return device.measured or _derived(device)


@lru_cache
def _derived(device: Device) -> Speeds:
    known = H200.measured
    assert known is not None
    matrix_flops = device.matrix[2] * known.matrix_flops / H200.matrix[2]
    share = {size: rate / device.matrix[2] for size, rate in device.matrix.items()}
    full = known.matrix_share[4] * known.matrix_flops / H200.flops  # the library's share of the scalar units
    double = known.matrix_share[8] * known.matrix_flops / H200.matrix[8]
    of_float32, of_float64 = full * device.flops / matrix_flops, double * device.matrix[8] / matrix_flops
    specialised = device.has(Feature.WARP_GROUPS)
    attention = {key: value for key, value in known.attention.items() if specialised or key[0] != WARP_SPECIALISED}
    scaled = {
        key: value if key[0] != "efficient" else known.attention[key].scaled(of_float32 / share[4])
        for key, value in known.tf32_attention.items()
    }
    return replace(
        known,
        bandwidth=device.bandwidth * known.bandwidth / H200.bandwidth,
        cache_bandwidth=device.multiprocessors * known.cache_bandwidth / H200.multiprocessors,
        flops=device.flops * known.flops / H200.flops,
        matrix_flops=matrix_flops,
        matrix_share={1: share[1], 2: 1.0, 4: of_float32, 8: of_float64},
        tf32_share=share[4],
        attention=attention,
        tf32_attention=scaled,
        products=_products(device, known),
        persistent=_persistent(device, known),
    )


def _persistent(device: Device, known: Speeds) -> PersistentSpeeds:
    """Return the speeds of persistent products; from registers, every shape is as fast as through pointers."""
    if device.has(Feature.ASYNC_UNITS):
        return known.persistent
    shapes = (replace(shape, share=_POINTERS, apart=_POINTERS, joined=0.0) for shape in known.persistent.shapes)
    return replace(known.persistent, shapes=tuple(shapes))


def _products(device: Device, known: Speeds) -> ProductSpeeds:
    """Return the shares of products; float32 takes three products of TF32, where the device has them."""
    if device.has(Feature.ASYNC_UNITS):
        pointers, shares = known.products.pointers, known.products
    else:
        pointers = _POINTERS
        misaligned = pointers * known.products.misaligned / known.products.pointers
        shares = replace(known.products, pointers=pointers, misaligned=misaligned, int8=pointers, tf32=pointers)
        shares = replace(shares, by_warps=1.0)  # there is no other instruction
        shares = replace(shares, chained_pointers=shares.chained, tf32_chained=shares.chained)
    split = device.matrix[4] / (3 * device.flops) if device.has(Feature.TF32) else 1.0
    return replace(shares, float32=pointers * split)
