"""Capabilities: what the scheduler may know about a device and the arithmetic that is wanted on it."""

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
    """What can be generated for a device, and what it costs there."""
    known = speeds(device)
    attention, share = known.attention, known.matrix_share
    if numerics.tf32:
        attention, share = {**attention, **known.tf32_attention}, {**share, 4: known.tf32_share}
    return Capabilities(
        fold_ops=frozenset(FOLD_OPS),
        whole_limit=32_768,  # elements of a row: 32 per thread of 1024; of 50257, a walk took 0.75 of the time
        window_limit=25,  # else a tile folds it across threads: a pool of 3 by 3 took 13 times as long
        parallelism=2 * device.multiprocessors,
        launch_us=known.launch_us,
        bandwidth=known.bandwidth,
        flops=known.flops,
        matrix_flops=known.matrix_flops,
        matrix_share=share,
        product_us=known.product_us,
        padded=True,
        alignment=16,
        crowding=0.02,
        attention=attention,
        forms=(GENERATED, GROUPED) if device.has(Feature.WARP_GROUPS) else (GENERATED,),
        follows=not numerics.strict,
        scatters=frozenset({"store", *ATOMIC}),
        ordered=False,
        odd_rows=known.odd_rows,
        narrow_tiles=known.narrow_tiles,
        narrow_share=known.narrow_share,
        waiting=known.waiting,
        part=known.part,
        layouts=known.layouts,
    )
