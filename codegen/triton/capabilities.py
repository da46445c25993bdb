"""Capabilities: the properties of a device and its arithmetic that the scheduler may use."""

from __future__ import annotations

from functools import lru_cache

from fusion.codegen.attention import GENERATED
from fusion.codegen.numerics import Numerics
from fusion.codegen.target import Capabilities
from fusion.codegen.triton.devices import GROUPED, Device, Feature, speeds
from fusion.codegen.triton.statements.updates import ATOMIC
from fusion.lowering.scalar_ops import FOLD_OPS


@lru_cache
def capabilities(device: Device, numerics: Numerics) -> Capabilities:
    """Return what can be generated for a device, and its cost there."""
    measured = speeds(device)
    attention, share = measured.attention, measured.matrix_share
    if numerics.tf32:
        attention, share = {**attention, **measured.tf32_attention}, {**share, 4: measured.tf32_share}
    return Capabilities(
        fold_ops=frozenset(FOLD_OPS),
        whole_limit=32_768,  # elements of a row: 32 per thread of 1024; for 50257, a loop took 0.75 of the time
        window_limit=25,  # longer windows are folded across threads: a pool of 3 by 3 took 13 times as long
        parallelism=2 * device.multiprocessors,
        launch_us=measured.launch_us,
        bandwidth=measured.bandwidth,
        flops=measured.flops,
        matrix_flops=measured.matrix_flops,
        matrix_share=share,
        product_us=measured.product_us,
        padded=True,
        alignment=16,
        crowding=0.02,
        attention=attention,
        forms=(GENERATED, GROUPED) if device.has(Feature.WARP_GROUPS) else (GENERATED,),
        follows=not numerics.strict,
        scatters=frozenset({"store", *ATOMIC}),
        ordered=False,
        odd_rows=measured.odd_rows,
        narrow_tiles=measured.narrow_tiles,
        narrow_share=measured.narrow_share,
        waiting=measured.waiting,
        part=measured.part,
        layouts=measured.layouts,
    )
