"""Chains: configurations of contractions whose results are folded or contracted again, such as attention.

What enters is a kernel over block dimensions that walks the rows or columns of a contraction; what leaves are
configurations, the default first.  Such a program keeps its rows and its sums in registers for the whole walk, so the
width that is held decides how many of them fit.  The numbers come from measurements on an H200: what counts there is
that two or more groups of four warps share a multiprocessor, so that one multiplies while another takes exponentials.
Where two products are of the kind of `products/chained.py`, two such groups may be one program (`ahead.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import torch

from fusion.codegen.attention import GENERATED
from fusion.codegen.numerics import Numerics
from fusion.codegen.target import Form
from fusion.codegen.triton.blocks import Blocked, Config, extent, keeps_busy, power_of_two, programs
from fusion.codegen.triton.choices import grouped, walks
from fusion.codegen.triton.devices import GROUPED, Feature
from fusion.codegen.triton.products import descriptors, groups
from fusion.codegen.triton.products.matrix_units import on_matrix_units
from fusion.lowering.kernel import Role
from fusion.lowering.scalar_ops import HALVES

_Table: TypeAlias = "dict[int, tuple[Config, ...]]"
"""Width that is held, at most → configurations, the fastest on a full device first."""


def _walk(m: int, n: int, warps: int, stages: int, *, by: str = "descriptors", split: bool = False) -> Config:
    blocks = (("m", m), ("n", n))
    return Config(blocks, num_warps=warps, num_stages=stages, split=split, descriptors=by == "descriptors", group=1)


def _read(m: int, n: int, warps: int, stages: int) -> Config:
    """A walk that reads through pointers, apart where its condition holds everywhere."""
    return _walk(m, n, warps, stages, by="pointers", split=True)


_ONE = (  # one product, whose result is folded
    *(_walk(128, 256, 8, 3), _walk(128, 128, 8, 3), _walk(64, 256, 8, 3)),
    *(_walk(64, 128, 4, 4), _walk(32, 128, 4, 4), _walk(16, 128, 4, 4)),
)
_TWO: _Table = {
    64: (_walk(64, 128, 4, 2), _walk(128, 64, 8, 3, by="pointers"), _walk(64, 64, 4, 3), _walk(128, 64, 4, 3)),
    128: (_walk(128, 64, 8, 3, by="pointers"), _walk(64, 64, 4, 3), _walk(128, 64, 8, 3)),
    256: (_walk(64, 32, 4, 3), _walk(64, 64, 4, 2), _walk(128, 32, 8, 2)),
}
_TWO_SKIPPING: _Table = {
    64: (_read(64, 64, 4, 3), _read(128, 64, 8, 3), _walk(64, 64, 4, 3), _walk(128, 64, 8, 3, split=True)),
    128: (_read(64, 64, 4, 3), _read(128, 64, 8, 3), _walk(64, 64, 4, 3), _walk(128, 64, 8, 3)),
    256: _TWO[256],
}
_TWO_SCANNED: _Table = {  # a scan leaves few blocks, so that what comes before them counts
    64: (_read(64, 64, 4, 3), _read(128, 64, 8, 3), _read(128, 32, 4, 3), _walk(64, 64, 4, 3, by="pointers")),
    128: (_read(64, 32, 4, 3), _read(128, 64, 8, 3), _read(128, 32, 4, 3), _read(64, 64, 4, 3)),
    256: _TWO[256],
}
_THREE: _Table = {  # the gradient of the queries
    64: (_walk(128, 64, 8, 3, by="pointers"), _walk(128, 64, 8, 3), _walk(64, 64, 4, 2)),
    128: (_walk(128, 64, 8, 3, by="pointers"), _walk(128, 32, 8, 3), _walk(64, 64, 4, 2)),
    256: (_walk(64, 32, 8, 2), _walk(32, 32, 4, 2)),
}
_THREE_SKIPPING: _Table = {
    64: (_read(64, 64, 4, 3), _read(128, 64, 8, 3), _read(64, 32, 4, 3), _walk(128, 64, 8, 3)),
    128: (_read(64, 64, 4, 2), _walk(128, 64, 8, 3, by="pointers"), _read(128, 32, 4, 3), _read(64, 32, 4, 3)),
    256: _THREE[256],
}
_THREE_SCANNED: _Table = {128: (_read(64, 32, 4, 3), _read(64, 64, 4, 2)), 256: _THREE[256]}
_FOUR: _Table = {  # the gradients of keys and values: twice the sums
    64: (_walk(64, 64, 4, 3, by="pointers"), _walk(64, 128, 4, 2, by="pointers"), _walk(64, 64, 4, 2)),
    128: (_walk(64, 64, 4, 2), _walk(128, 64, 8, 3, by="pointers"), _walk(64, 32, 4, 3, by="pointers")),
    256: (_walk(64, 32, 8, 2), _walk(32, 32, 4, 2)),
}
_FOUR_SKIPPING: _Table = {
    64: (_read(64, 128, 4, 2), _read(64, 64, 4, 3), _read(64, 32, 4, 3), _walk(64, 64, 4, 3)),
    128: (
        *(_walk(64, 64, 4, 2, by="pointers"), _walk(128, 64, 8, 3, by="pointers"), _walk(64, 64, 4, 2)),
        _walk(64, 32, 4, 3, by="pointers"),
    ),
    256: _FOUR[256],
}
_FOUR_SCANNED: _Table = {128: (_read(64, 64, 4, 2), _read(64, 32, 4, 3)), 256: _FOUR[256]}
_EXACT: _Table = {  # operands of 32 or 64 bits; more than two products take as much room as twice the width
    64: (_walk(64, 32, 4, 2), _walk(32, 32, 4, 2), _walk(16, 32, 4, 1)),
    128: (_walk(64, 32, 4, 2), _walk(32, 32, 4, 1), _walk(16, 32, 4, 1)),
    256: (_walk(16, 32, 8, 1), _walk(16, 16, 8, 1)),
    512: (_walk(16, 16, 8, 1),),
}
_WIDER = (_walk(32, 32, 8, 1), _walk(16, 16, 8, 1))


def candidates(blocked: Blocked, numerics: Numerics) -> tuple[Config, ...]:
    """Configurations worth timing, the default first: the first that keeps the device busy."""
    described = bool(descriptors.matrices(blocked))
    found, together = [], walks.together(blocked) if walks.skips(blocked) else 1
    in_groups = grouped.candidates(blocked, together)
    for config in _listed(blocked):
        fitted = _fitted(blocked, config)
        ragged = not config.descriptors and walks.is_ragged(blocked, fitted)
        through = config.descriptors and described
        group = 1 if through else together
        found.append(
            replace(fitted, tf32=numerics.tf32, descriptors=through, split=config.split or ragged, group=group)
        )
    busy = [config for config in found if keeps_busy(blocked, config)]
    quick = [config for config in busy if not config.descriptors] if walks.steps(blocked) <= walks.SHORT else []
    first = in_groups if in_groups and not grouped.refused(blocked) else ()
    default = (first or quick or busy or sorted(found, key=lambda config: -programs(blocked, config)))[0]
    return tuple(dict.fromkeys((default, *in_groups, *found)))


def forms(blocked: Blocked) -> tuple[Form, ...]:
    """The forms of a kernel whose walk has several products, the one that it takes first."""
    if len(blocked.dots) < 2 or not blocked.chained or not groups.run_on(blocked.device):
        return (Form(GENERATED),)
    why = grouped.refused(blocked)
    return (Form(GENERATED), Form(GROUPED, why)) if why else (Form(GROUPED), Form(GENERATED))


def _listed(blocked: Blocked) -> tuple[Config, ...]:
    dtypes = {arg.dtype for dot in blocked.dots for arg in dot.args}
    products = len(blocked.dots)
    width = max((power_of_two(extent(dim.size)) for dim in blocked.dims if dim.role is Role.WHOLE), default=0)
    if not dtypes <= {*HALVES, torch.int8} or not all(on_matrix_units(dtype, blocked.device) for dtype in dtypes):
        table, width = _EXACT, width * (1 if products <= 2 else 2)
    elif products == 1 and not width:
        return _ONE
    elif products <= 2:
        table = _kind(blocked, _TWO, _TWO_SKIPPING, _TWO_SCANNED)
    else:
        three, four = (_THREE, _THREE_SKIPPING, _THREE_SCANNED), (_FOUR, _FOUR_SKIPPING, _FOUR_SCANNED)
        table = _kind(blocked, *(three if products == 3 else four))
        if not blocked.device.has(Feature.TENSOR_COPIES):
            width *= 2  # operands are held in registers too
    return next((configs for held, configs in table.items() if width <= held), _WIDER)


def _kind(blocked: Blocked, plain: _Table, skipping: _Table, scanned: _Table) -> _Table:
    return scanned if walks.scans(blocked) else skipping if walks.skips(blocked) else plain


def _fitted(blocked: Blocked, config: Config) -> Config:
    """A configuration cut down to the sizes of the kernel; whole dimensions held whole, and no block below 16."""
    blocks: dict[str, int] = {}
    for dim in blocked.dims:
        if dim.name != "b":
            length = power_of_two(extent(dim.size))
            wanted = length if dim.role is Role.WHOLE else dict(config.blocks).get(dim.name, 64)
            blocks[dim.name] = max(16, min(length, wanted))
    return replace(config, blocks=tuple(blocks.items()))
