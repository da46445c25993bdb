"""Orders the forms of a single kernel by preference.

The default form of a kernel is the first in `SINGLE_KERNEL` that applies and that no later one is likely to beat
(`Form.slower`).  This tuple is the only place where that is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusion.codegen.triton.blocks import Config, describe
from fusion.codegen.triton.forms import limits
from fusion.codegen.triton.forms.alternating_product import AlternatingProduct
from fusion.codegen.triton.forms.chained import Chained
from fusion.codegen.triton.forms.form import Choice, Form, Refused, Task
from fusion.codegen.triton.forms.maps import Maps
from fusion.codegen.triton.forms.matrix_vector import MatrixVector
from fusion.codegen.triton.forms.persistent_product import PersistentProduct
from fusion.codegen.triton.forms.pointer_product import PointerProduct
from fusion.codegen.triton.forms.rows import Rows
from fusion.codegen.triton.forms.scaled import Scaled
from fusion.codegen.triton.forms.scans import Scans
from fusion.codegen.triton.forms.shared_rows import SharedRows
from fusion.codegen.triton.forms.skinny import Skinny
from fusion.codegen.triton.forms.warp_specialised import WarpSpecialised

SINGLE_KERNEL: tuple[type[Form], ...] = (
    Scaled,
    Maps,
    Scans,
    MatrixVector,
    SharedRows,
    Rows,
    WarpSpecialised,
    Chained,
    Skinny,
    AlternatingProduct,
    PersistentProduct,
    PointerProduct,
)


INVARIANT: tuple[type[Form], ...] = (Maps, Scans, Rows, PointerProduct)
"""The forms under batch-invariant numerics: one for each kind of kernel, whatever its sizes."""


def plans(task: Task) -> list[Form]:
    """Return the plans of the forms that apply to a kernel, in their order."""
    forms = INVARIANT if task.numerics.invariant else SINGLE_KERNEL
    return [plan for form in forms if not isinstance(plan := form.applies(task), Refused)]


def default(task: Task) -> Form:
    """Return the plan of the default form of a kernel."""
    return next(plan for plan in plans(task) if not plan.slower)


def candidates(task: Task) -> tuple[Choice, ...]:
    """Return forms and configurations worth timing that fit the device, the default first; only the default under
    batch-invariant numerics.
    """
    listed = [(plan, config) for plan in plans(task) for config in plan.configs()]
    if task.numerics.invariant:
        return within(listed[:1])
    first = next(choice for choice in listed if not choice[0].slower)
    return within((first, *listed))


def within(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices that fit the device, in their order; if none does, the one with the least shared memory."""
    cut = [(form, limits.on_warps(config, form.task.device)) for form, config in choices]
    fitting = [(form, fitted) for form, config in cut if (fitted := form.fit(config)) is not None]
    if not fitting:
        form, config = min(cut, key=lambda choice: choice[0].room(replace(choice[1], num_stages=1)))
        fitting = [(form, replace(config, num_stages=1))]
    first: dict[Config, Choice] = {}
    for choice in fitting:
        first.setdefault(choice[1], choice)
    return tuple(first.values())


def taking(task: Task, config: Config) -> Form:
    """Return the plan of the first form that applies to a kernel and supports such a configuration.

    Raises:
        ValueError: no form does.
    """
    supporting = next((plan for plan in plans(task) if type(config) in plan.takes), None)
    if supporting is None:
        raise ValueError(f"{task.kernel.name} has no form that takes the configuration {describe(config)}")
    return supporting
