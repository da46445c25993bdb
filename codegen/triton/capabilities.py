"""Describes the properties of a device, and its arithmetic, to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fusion.codegen.chained import GENERATED, ChainSpeed
from fusion.codegen.numerics import Numerics
from fusion.codegen.price import Rates
from fusion.codegen.target import Capabilities
from fusion.codegen.triton.devices import WARP_SPECIALISED, Device, Feature, speeds
from fusion.codegen.triton.fixed_order import HELD_ELEMENTS
from fusion.codegen.triton.forms.traffic import SECTOR
from fusion.codegen.triton.statements.updates import ATOMIC
from fusion.lowering.ir.scalar_ops import FOLD_OPS

HELD_PER_THREAD = 32
"""Elements of the longest row that is held in registers, per thread.  A loop is faster for longer rows
(measured: docs/performance.md, `HELD_PER_THREAD`)."""

FOLLOWED_PER_THREAD = 16
"""The same of a row that only folds read, of which one needs another.  (measured: docs/performance.md,
`FOLLOWED_PER_THREAD`)"""

HELD_WITH_SUMS = 8
"""The same for a row beside running sums of its columns: 8 warps have registers for two sums and two operands."""

TRIAL = 2.5
"""Seconds of a first trial: compilers are started, and the device's libraries loaded.  (measured: docs/performance.md,
`TRIAL`)"""

PROGRAMS = 2
"""Programs on each multiprocessor that hide the latency of memory."""


@lru_cache
def capabilities(device: Device, numerics: Numerics) -> Capabilities:
    """Return the operations supported on a device, and their costs there."""
    measured = speeds(device)
    share = {**measured.matrix_share, 4: measured.tf32_share} if numerics.tf32 else measured.matrix_share
    return Capabilities(
        fold_ops=frozenset(FOLD_OPS),
        whole_limit=HELD_ELEMENTS if numerics.invariant else HELD_PER_THREAD * device.threads_per_program,
        followed_limit=FOLLOWED_PER_THREAD * device.threads_per_program,
        window_limit=measured.longest_window,
        parallelism=PROGRAMS * device.multiprocessors,
        programs_per_multiprocessor=PROGRAMS,
        tiles=measured.tiles,
        rates=Rates(
            launch_us=measured.launch_us,
            bandwidth=measured.bandwidth,
            flops=measured.flops,
            matrix_flops=measured.matrix_flops,
            matrix_share=share,
            product_us=measured.product_us,
            steps=measured.steps,
            overlap=measured.overlap,
        ),
        narrow=True,
        padded=True,
        held_row=0 if numerics.invariant else HELD_WITH_SUMS * device.threads_per_program,
        bounds=True,
        alignment=16,
        crowding=measured.crowding,
        most_followed=measured.followed * device.multiprocessors,
        follows=not numerics.strict,
        scatters=frozenset({"store", *ATOMIC}),
        ordered=False,
        scans=not numerics.invariant,
        trial=TRIAL,
        invariant=numerics.invariant,
        misaligned_rows=measured.misaligned_rows,
        narrow_tiles=measured.narrow_tiles,
        narrow_share=measured.narrow_share,
        waiting=measured.waiting,
        part=measured.part,
        sector=SECTOR,
        layouts=measured.layouts,
    )


def chained_forms(device: Device) -> tuple[str, ...]:
    """Return the names of the forms of kernels with chained products."""
    return (GENERATED, WARP_SPECIALISED) if device.has(Feature.WARP_GROUPS) else (GENERATED,)


@lru_cache
def chain_speeds(device: Device, numerics: Numerics) -> Mapping[tuple[str, int], ChainSpeed]:
    """Return the speeds of chained products, by the name of a form or of the library's kernel and an element's size."""
    measured = speeds(device)
    return {**measured.attention, **measured.tf32_attention} if numerics.tf32 else measured.attention
