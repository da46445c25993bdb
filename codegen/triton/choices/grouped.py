"""Grouped: whether attention is computed in groups of warps (`ahead.py`), in how many, and if not, why.

What enters is a kernel over block dimensions; what leaves are configurations, or a reason that users read.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.codegen.triton.blocks import Blocked, Config, extent, keeps_busy, power_of_two, programs
from fusion.codegen.triton.choices import walks
from fusion.codegen.triton.products import groups
from fusion.codegen.triton.products.chained import NARROW, WALKED, chain_of
from fusion.lowering.kernel import Role

_SPEED = {3: 1.1, 2: 1.0}  # of so many groups against two

_SHORT_WIDE = 512  # steps of a walk of wide heads below which nothing was measured


def candidates(blocked: Blocked, together: int) -> tuple[Config, ...]:
    """The configurations in which groups of warps compute this kernel, the best first; none if they do not.

    They have as many slots of what is walked as fit: three for heads of 64, two for wider ones.
    """
    if not groups.run_on(blocked.device) or isinstance(chain_of(blocked), str):
        return ()
    return tuple(_config(blocked, count, together) for count in _counts(blocked))


def refused(blocked: Blocked) -> str:
    """Why this kernel is not computed in groups of warps; empty where it is.

    Measured against the form that Triton pipelines: 1.4 to 1.45 times as fast on heads of 128 and walks of 512 to
    16384, 1.25 to 1.35 times with a mask, 2 times on heads of 256, 1.1 times on those of 64 and walks of 1024 or more,
    0.9 to 1 times with a mask.
    """
    if not groups.run_on(blocked.device):
        return f"{blocked.device.arch} does not multiply in groups of warps"
    chain = chain_of(blocked)
    if isinstance(chain, str):
        return chain
    least = _config(blocked, 2, 1)
    if not keeps_busy(blocked, least):
        return f"{programs(blocked, least)} blocks of rows leave multiprocessors idle"
    if walks.steps(blocked) < (_SHORT_WIDE if _wide(blocked) else walks.SHORT):
        return f"a walk of {walks.steps(blocked)} is over before the ring is full"
    if not _wide(blocked) and walks.skips(blocked):
        return "narrow heads with a mask are faster in smaller blocks"
    return ""


def _config(blocked: Blocked, count: int, together: int) -> Config:
    held = {dim.name: power_of_two(extent(dim.size)) for dim in blocked.dims if dim.role is Role.WHOLE}
    made = {"m": count * groups.ROWS, "n": WALKED[max(held.values())], **held}
    stages = 2 if _wide(blocked) else 3
    config = Config(tuple(made.items()), num_warps=4, num_stages=stages, persistent=True, groups=count, split=True)
    return replace(config, registers=groups.registers(count), group=together)


def _counts(blocked: Blocked) -> tuple[int, ...]:
    """How many groups: the sums of two of them fit into registers, of narrow heads those of three.

    Three were 1.1 times as fast as two in long walks (H200, 16384 tokens of 16 heads), where their blocks are full.
    """
    if _wide(blocked):
        return (2,)
    rows = next(extent(dim.size) for dim in blocked.grid() if dim.name == "m")
    full = {count: rows / (-(-rows // (count * groups.ROWS)) * count * groups.ROWS) for count in _SPEED}
    return tuple(sorted(_SPEED, key=lambda count: -full[count] * _SPEED[count]))


def _wide(blocked: Blocked) -> bool:
    return any(extent(dim.size) > NARROW for dim in blocked.dims if dim.role is Role.WHOLE)
