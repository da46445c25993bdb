"""Describes the properties of a device, and its arithmetic, to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fusion.codegen.chained import GENERATED, ChainSpeed
from fusion.codegen.numerics import Numerics
from fusion.codegen.price import WIDE, Rates, Steps
from fusion.codegen.target import Capabilities
from fusion.codegen.triton.devices import GROUPED, Device, Feature, speeds
from fusion.codegen.triton.fixed_order import HELD
from fusion.codegen.triton.forms.traffic import SECTOR
from fusion.codegen.triton.statements.updates import ATOMIC
from fusion.lowering.scalar_ops import FOLD_OPS

WINDOWED = 8.0
"""Additions that take as long as a load of a window from a cache, in full vectors.

(measured: docs/performance.md, `WINDOWED`)
"""

LONGEST_HELD = 1 << 15
"""Elements of the longest row held whole: 32 per thread of 1024.  (For 50257, a loop took 0.75 of the time.)"""

FOLLOWED = 4
"""Programs per multiprocessor above which it costs more to count them than to launch another kernel: each waits until
all that it has stored is seen by others.  (measured: docs/performance.md, `FOLLOWED`)
"""

HELD_ROW = 1 << 13
"""Elements of the longest row that a program holds beside running sums of its columns: 8 warps have registers for two
sums and two operands."""

GATHER = 32.0
"""The cost of an uncoalesced load, in additions: the cache lines of a warp's 32 threads are fetched one by one.

An estimate: not measured.
"""


@lru_cache
def capabilities(device: Device, numerics: Numerics) -> Capabilities:
    """Return the operations supported on a device, and their costs there."""
    measured = speeds(device)
    share = {**measured.matrix_share, 4: measured.tf32_share} if numerics.tf32 else measured.matrix_share
    return Capabilities(
        fold_ops=frozenset(FOLD_OPS),
        whole_limit=HELD if numerics.invariant else LONGEST_HELD,
        window_limit=25,  # longer windows are folded across threads: a pool of 3 by 3 took 13 times as long
        parallelism=2 * device.multiprocessors,
        rates=Rates(
            launch_us=measured.launch_us,
            bandwidth=measured.bandwidth,
            flops=measured.flops,
            matrix_flops=measured.matrix_flops,
            matrix_share=share,
            product_us=measured.product_us,
            steps=Steps(gathered=GATHER, computed=GATHER, windowed=WINDOWED, shifted=2.5, strided=5.0, wide=WIDE),
        ),
        narrow=True,
        padded=True,
        held_row=0 if numerics.invariant else HELD_ROW,
        bounds=True,
        alignment=16,
        crowding=0.02,
        most_followed=FOLLOWED * device.multiprocessors,
        follows=not numerics.strict,
        scatters=frozenset({"store", *ATOMIC}),
        ordered=False,
        scans=not numerics.invariant,
        invariant=numerics.invariant,
        odd_rows=measured.odd_rows,
        narrow_tiles=measured.narrow_tiles,
        narrow_share=measured.narrow_share,
        waiting=measured.waiting,
        part=measured.part,
        sector=SECTOR,
        layouts=measured.layouts,
    )


def chained_forms(device: Device) -> tuple[str, ...]:
    """Return the names of the forms of kernels with chained products."""
    return (GENERATED, GROUPED) if device.has(Feature.WARP_GROUPS) else (GENERATED,)


@lru_cache
def chain_speeds(device: Device, numerics: Numerics) -> Mapping[tuple[str, int], ChainSpeed]:
    """Return the speeds of chained products, by the name of a form or of the library's kernel and an element's size."""
    measured = speeds(device)
    return {**measured.attention, **measured.tf32_attention} if numerics.tf32 else measured.attention
