"""Decides which kernels can be alternating products, and names their matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.codegen.triton.blocks import Blocked
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.expressions.matrices import Matrix
from fusion.codegen.triton.forms import persistent_product
from fusion.codegen.triton.forms.form import Task
from fusion.codegen.triton.forms.persistent_product.rule import factors
from fusion.codegen.triton.forms.warp_groups import groups
from fusion.codegen.triton.products.descriptors import matrix_of, target_of, tile_loads
from fusion.lowering.ir.expr import Load, Random, postorder
from fusion.lowering.ir.kernel import Loop, Role, Store, values_of


@dataclass(frozen=True, slots=True)
class Moved:
    """The matrices that pass through shared memory: both operands, and the results by parameter."""

    left: Matrix
    right: Matrix
    results: dict[str, Matrix]

    @property
    def all(self) -> Sequence[Matrix]:
        """Return all matrices."""
        return (self.left, self.right, *self.results.values())


def refusal(task: Task) -> str:
    """Return why a kernel cannot be an alternating product; empty if it can."""
    kernel, blocked = task.kernel, task.blocked
    if not groups.run_on(task.device) or speeds(task.device).persistent.alternating is None:
        return f"{task.device.arch} does not multiply in groups of warps"
    if kernel.beside or kernel.then is not None:
        return "it is launched with others"
    why = persistent_product.rule.refusal(blocked)
    if why:
        return why
    if len(blocked.dots) != 1 or any(dim.name == "b" for dim in blocked.dims):
        return "it is several products, or a batch of them"
    looped = next(dim for dim in blocked.dims if dim.role is Role.LOOP)
    if not looped.size.is_Integer or looped.size == 0 or any(loop.where is not None for loop in _loops(blocked)):
        return "the length of its sum is unknown, or it skips parts of it"
    return _ending(blocked)


def _loops(blocked: Blocked) -> list[Loop]:
    return [stmt for stmt in blocked.body if isinstance(stmt, Loop)]


def _ending(blocked: Blocked) -> str:
    """Return why the epilogue is not one of this form; empty if it is."""
    stores = [stmt for stmt in blocked.body if isinstance(stmt, Store)]
    values = [value for stmt in stores for value in values_of(stmt)]
    if any(isinstance(node, Random) for node in postorder(*values)):
        return "it draws random numbers, by functions that create tiles without a layout"
    if any(tile_loads(blocked, values)):
        return "its epilogue loads tiles"
    moved = moved_by(blocked)
    if moved is None:
        return "a result is no matrix of 16 bits that a descriptor holds"
    return "" if all(matrix.base == 0 for matrix in moved.all) else "a matrix begins inside of its tensor"


def moved_by(blocked: Blocked) -> Moved | None:
    """Return the matrices of a kernel that is a persistent product; None if a result does not leave as a tile."""
    operands = [matrix_of(blocked, factor, *sides) for factor, sides in factors(blocked) if isinstance(factor, Load)]
    results: dict[str, Matrix] = {}
    for stmt in blocked.body:
        if isinstance(stmt, Store):
            target = target_of(blocked, stmt)
            if target is None or target.rows.name != "m" or stmt.axes is not None:
                return None
            results[stmt.param] = target
    left, right = operands
    assert left is not None and right is not None, "called for a kernel that `refusal` refuses"
    return Moved(left, right, results)
