"""Generates chained products: contractions whose results are folded or contracted again, such as attention.

A program keeps its rows and its accumulators in registers for a full loop over rows or columns of a product, so the
width that is held determines how many rows fit.  There is one block of the result per program; operands come through
pointers or, where possible, through tensor descriptors (`DescribedConfig`), each of which starts at the matrix of this
program's batch index.  The configurations were measured on an H200: the deciding factor is that two or more groups of
four warps share a multiprocessor, so that one multiplies while another computes exponentials.  (`warp_specialised` does
so within one program.)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import torch
from typing_extensions import Self

from fusion.codegen.triton.blocks import Blocked, Config, extent, keeps_busy, power_of_two, programs
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.expressions.matrices import Matrix
from fusion.codegen.triton.forms import efficiency, long_loops
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.products.descriptors import Descriptors, matrix_of
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.kernel import Role
from fusion.lowering.ir.scalar_ops import HALVES


@dataclass(frozen=True, slots=True)
class DescribedConfig(Config):
    """A configuration of a chained product whose operands come through tensor descriptors."""

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        return ["descriptors"]


_Table: TypeAlias = "dict[int, tuple[Config, ...]]"
"""For each greatest width that is held, configurations, the fastest on a full device first."""


def _described(m: int, n: int, warps: int, stages: int, *, split: bool = False) -> Config:
    """Return a configuration with operands through tensor descriptors where possible."""
    return DescribedConfig((("m", m), ("n", n)), num_warps=warps, num_stages=stages, split=split, group=1)


def _pointers(m: int, n: int, warps: int, stages: int) -> Config:
    """Return a configuration with operands through pointers."""
    return Config((("m", m), ("n", n)), num_warps=warps, num_stages=stages, group=1)


def _split(m: int, n: int, warps: int, stages: int) -> Config:
    """Return a configuration with operands through pointers, and a loop of its own where the condition always holds."""
    return replace(_pointers(m, n, warps, stages), split=True)


_ONE = (  # one product, whose result is folded
    *(_described(128, 256, 8, 3), _described(128, 128, 8, 3), _described(64, 256, 8, 3)),
    *(_described(64, 128, 4, 4), _described(32, 128, 4, 4), _described(16, 128, 4, 4)),
)
_TWO: _Table = {
    64: (_described(64, 128, 4, 2), _pointers(128, 64, 8, 3), _described(64, 64, 4, 3), _described(128, 64, 4, 3)),
    128: (_pointers(128, 64, 8, 3), _described(64, 64, 4, 3), _described(128, 64, 8, 3)),
    256: (_described(64, 32, 4, 3), _described(64, 64, 4, 2), _described(128, 32, 8, 2)),
}
_TWO_SKIPPING: _Table = {
    64: (_split(64, 64, 4, 3), _split(128, 64, 8, 3), _described(64, 64, 4, 3), _described(128, 64, 8, 3, split=True)),
    128: (_split(64, 64, 4, 3), _split(128, 64, 8, 3), _described(64, 64, 4, 3), _described(128, 64, 8, 3)),
    256: _TWO[256],
}
_TWO_SCANNED: _Table = {  # a lookup leaves few blocks, so that the time before them counts
    64: (_split(64, 64, 4, 3), _split(128, 64, 8, 3), _split(128, 32, 4, 3), _pointers(64, 64, 4, 3)),
    128: (_split(64, 32, 4, 3), _split(128, 64, 8, 3), _split(128, 32, 4, 3), _split(64, 64, 4, 3)),
    256: _TWO[256],
}
_THREE: _Table = {  # the gradient of the queries
    64: (_pointers(128, 64, 8, 3), _described(128, 64, 8, 3), _described(64, 64, 4, 2)),
    128: (_pointers(128, 64, 8, 3), _described(128, 32, 8, 3), _described(64, 64, 4, 2)),
    256: (_described(64, 32, 8, 2), _described(32, 32, 4, 2)),
}
_THREE_SKIPPING: _Table = {
    64: (_split(64, 64, 4, 3), _split(128, 64, 8, 3), _split(64, 32, 4, 3), _described(128, 64, 8, 3)),
    128: (_split(64, 64, 4, 2), _pointers(128, 64, 8, 3), _split(128, 32, 4, 3), _split(64, 32, 4, 3)),
    256: _THREE[256],
}
_THREE_SCANNED: _Table = {128: (_split(64, 32, 4, 3), _split(64, 64, 4, 2)), 256: _THREE[256]}
_FOUR: _Table = {  # the gradients of keys and values: twice the accumulators
    64: (_pointers(64, 64, 4, 3), _pointers(64, 128, 4, 2), _described(64, 64, 4, 2)),
    128: (_described(64, 64, 4, 2), _pointers(128, 64, 8, 3), _pointers(64, 32, 4, 3)),
    256: (_described(64, 32, 8, 2), _described(32, 32, 4, 2)),
}
_FOUR_SKIPPING: _Table = {
    64: (_split(64, 128, 4, 2), _split(64, 64, 4, 3), _split(64, 32, 4, 3), _described(64, 64, 4, 3)),
    128: (
        *(_pointers(64, 64, 4, 2), _pointers(128, 64, 8, 3), _described(64, 64, 4, 2)),
        _pointers(64, 32, 4, 3),
    ),
    256: _FOUR[256],
}
_FOUR_SCANNED: _Table = {128: (_split(64, 64, 4, 2), _split(64, 32, 4, 3)), 256: _FOUR[256]}
_FOUR_MASKED: _Table = {**_FOUR_SKIPPING, 128: _FOUR_SCANNED[128]}
"""The same where blocks read a mask from memory unless the condition holds throughout.  (measured:
docs/performance.md, `_FOUR_MASKED`)
"""
_EXACT: _Table = {  # operands of 32 or 64 bits; more than two products need as many registers as twice the width
    64: (_described(64, 32, 4, 2), _described(32, 32, 4, 2), _described(16, 32, 4, 1)),
    128: (_described(64, 32, 4, 2), _described(32, 32, 4, 1), _described(16, 32, 4, 1)),
    256: (_described(16, 32, 8, 1), _described(16, 16, 8, 1)),
    512: (_described(16, 16, 8, 1),),
}
_WIDER = (_described(32, 32, 8, 1), _described(16, 16, 8, 1))


@dataclass(frozen=True)
class Chained(Form):
    """The plan for a kernel that loops over rows or columns of a contraction."""

    name = "chained product"
    takes = (Config, DescribedConfig)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept any contraction whose rows or columns a loop folds or contracts again."""
        return cls(task) if task.blocked.chained else Refused("no loop folds or contracts its products again")

    def configs(self) -> tuple[Config, ...]:
        """Return the table's configurations for the products and the condition; the first that keeps the device busy
        leads.
        """
        blocked, configs = self.blocked, [self._adapted(config) for config in _listed(self.blocked)]
        busy = [config for config in configs if keeps_busy(blocked, config)]
        short = long_loops.steps(blocked) <= long_loops.SHORT_LOOP
        through_pointers = [config for config in busy if not isinstance(config, DescribedConfig)] if short else []
        default = (through_pointers or busy or sorted(configs, key=lambda config: -programs(blocked, config)))[0]
        return tuple(dict.fromkeys((default, *configs)))

    def _adapted(self, config: Config) -> Config:
        """Return a configuration of the table, adapted to the sizes and operands of this kernel."""
        blocked, fitted = self.blocked, _fitted(self.blocked, config)
        ragged = not isinstance(config, DescribedConfig) and long_loops.is_ragged(blocked, fitted)
        adapted = replace(fitted, tf32=self.task.numerics.tf32, split=config.split or ragged)
        if isinstance(adapted, DescribedConfig) and operands(blocked):
            return replace(adapted, group=1)
        together = long_loops.together(blocked) if long_loops.skips(blocked) else 1
        return _without_descriptors(replace(adapted, group=together))

    def efficiency(self) -> float:
        """Return the share of the speed of the matrix units: there is no library to compare with."""
        return efficiency.of_chain(self.blocked, self.task.numerics, described=bool(operands(self.blocked)))

    def open(self, body: Body) -> None:
        """Add the lines of a program, with the descriptors of its operands if the configuration has them."""
        body.assign_block()
        values = body.values
        if isinstance(values.layout.config, DescribedConfig):
            descriptors = Descriptors(values)
            for load, matrix in operands(self.blocked).items():
                values.load_through[load] = descriptors.of(matrix, values.layout)
        body.statements()


def operands(blocked: Blocked) -> dict[Load, Matrix]:
    """Return the operands that can come through descriptors."""
    if not blocked.device.has(Feature.TENSOR_COPIES) or not blocked.chained:
        return {}
    matrices: dict[Load, Matrix] = {}
    for dot in blocked.dots:
        rows, columns, over = blocked.sides(dot)
        for factor, (first, second) in zip(dot.args, ((rows, over), (over, columns)), strict=True):
            if isinstance(factor, Load) and factor.dtype in HALVES and factor not in matrices:
                matrix = matrix_of(blocked, factor, first, second)
                if matrix is not None:
                    matrices[factor] = matrix
    return matrices


def _without_descriptors(config: Config) -> Config:
    """Return the same configuration with operands through pointers."""
    return Config(**{field.name: getattr(config, field.name) for field in fields(Config)})


def _listed(blocked: Blocked) -> tuple[Config, ...]:
    dtypes = {arg.dtype for dot in blocked.dots for arg in dot.args}
    products = len(blocked.dots)
    width = max((power_of_two(extent(dim.size)) for dim in blocked.dims if dim.role is Role.WHOLE), default=0)
    if not dtypes <= {*HALVES, torch.int8} or not all(blocked.device.on_matrix_units(dtype) for dtype in dtypes):
        table, width = _EXACT, width * (1 if products <= 2 else 2)
    elif products == 1 and not width:
        return _ONE
    elif products <= 2:
        table = _kind(blocked, _TWO, _TWO_SKIPPING, _TWO_SCANNED)
    else:
        skipping = _FOUR_MASKED if long_loops.reads_mask(blocked) else _FOUR_SKIPPING
        three, four = (_THREE, _THREE_SKIPPING, _THREE_SCANNED), (_FOUR, skipping, _FOUR_SCANNED)
        table = _kind(blocked, *(three if products == 3 else four))
        if not blocked.device.has(Feature.TENSOR_COPIES):
            width *= 2  # operands are in registers too
    return next((configs for held, configs in table.items() if width <= held), _WIDER)


def _kind(blocked: Blocked, plain: _Table, skipping: _Table, scanned: _Table) -> _Table:
    return scanned if long_loops.scans(blocked) else skipping if long_loops.skips(blocked) else plain


def _fitted(blocked: Blocked, config: Config) -> Config:
    """Return a configuration cut to the sizes of the kernel, with WHOLE dimensions held and no block below 16.

    Fewer rows take fewer warps, if no loop waits for its loads (measured: docs/performance.md, `chained`).
    """
    blocks: dict[str, int] = {}
    for dim in blocked.dims:
        if dim.name != "b":
            length = power_of_two(extent(dim.size))
            wanted = length if dim.role is Role.WHOLE else dict(config.blocks).get(dim.name, 64)
            blocks[dim.name] = max(16, min(length, wanted))
    looped = [extent(dim.size) > blocks[dim.name] for dim in blocked.dims if dim.role is Role.LOOP]
    cut = min(1.0, blocks.get("m", 1) / config.block("m")) if not any(looped) else 1.0
    warps = max(min(4, config.num_warps), int(config.num_warps * cut))
    return replace(config, blocks=tuple(blocks.items()), num_warps=warps)
