"""Decides which kernels may share a launch: of a similar number of registers, and contractions in the same form."""

from __future__ import annotations

from fusion.codegen.triton.blocks import Config
from fusion.codegen.triton.forms import single_kernel
from fusion.codegen.triton.forms.alternating_product import AlternatingProduct
from fusion.codegen.triton.forms.form import Task
from fusion.codegen.triton.forms.persistent_product.config import PersistentConfig
from fusion.codegen.triton.forms.shared_rows import SharedRows
from fusion.codegen.triton.forms.side_by_side.alternating import joined
from fusion.codegen.triton.forms.side_by_side.joined import products_of
from fusion.codegen.triton.forms.side_by_side.parts import choices, first, is_persistent
from fusion.lowering.ir.kernel import Role


def alike(a: Task, b: Task) -> bool:
    """Return whether two kernels can share a launch without one of them losing registers or warps to the other."""
    one, other = a.blocked, b.blocked
    if one.contraction != other.contraction or one.chained or other.chained:
        return False
    if one.contraction and is_persistent(a) is not is_persistent(b):
        return False
    if one.contraction:
        return _multiply_alike(a, b)
    if any(isinstance(single_kernel.default(task), SharedRows) for task in (a, b)):
        return False
    ours, theirs = (first(task)[1] for task in (a, b))
    most, least = max(ours.num_warps, theirs.num_warps), min(ours.num_warps, theirs.num_warps)
    looped = {any(dim.role is not Role.GRID for dim in blocked.dims) for blocked in (one, other)}
    return len(looped) == 1 and (most <= 4 or most <= 2 * least)


def _multiply_alike(a: Task, b: Task) -> bool:
    """Return whether two contractions can share a launch; in one of two loops, epilogues of groups would be exposed."""
    if joined(a, (a.kernel, b.kernel)):
        return True
    in_turn = any(isinstance(single_kernel.default(task), AlternatingProduct) for task in (a, b))
    if in_turn and not products_of(a, (a.kernel, b.kernel)):
        return False
    return len({_family(config) for _, config in choices([a, b])}) == 1


def _family(config: Config) -> tuple[int, int, int]:
    each = config.per_processor if isinstance(config, PersistentConfig) else 0
    return config.num_warps, config.num_stages, each
