"""Lists the forms: the ways to spread a kernel over the programs of a launch, each of them a type.

| form                | kernels                                                                     |
|---------------------|-----------------------------------------------------------------------------|
| `joined`            | several products of the same rows, one loop over the blocks of all columns  |
| `side_by_side`      | independent kernels, each on its own range of programs                      |
| `last_block`        | a kernel, and others that the last program of its grid or tile runs         |
| `maps`              | pointwise kernels                                                           |
| `scans`             | rows or columns whose running sums are stored                               |
| `matrix_vector`     | products with up to four vectors, as sums of products                       |
| `shared_rows`       | folds of long rows that are stored, too: held in shared memory meanwhile    |
| `rows`              | folds of rows or columns                                                    |
| `warp_specialised`  | attention with one warp that loads and groups of warps that compute (sm_90) |
| `chained`           | products whose rows or columns are folded or contracted again               |
| `skinny`            | products with few columns, on the matrix units                              |
| `alternating_product`| products whose two groups of warps take blocks in turn (sm_90)              |
| `persistent_product`| products through tensor memory, in persistent programs (sm_90 and later)    |
| `pointer_product`   | any other product                                                           |

A new form is a file here, a subclass of `Form`, and an entry of `SINGLE_KERNEL` (or of `SEVERAL`, for launches of
several kernels).  The first form that applies and is not `slower` than a later one is the default.
"""

from __future__ import annotations

from fusion.codegen.triton.blocks import Config
from fusion.codegen.triton.forms import single_kernel
from fusion.codegen.triton.forms.form import Choice, Form, Refused, Task
from fusion.codegen.triton.forms.last_block import LastBlock
from fusion.codegen.triton.forms.side_by_side import JoinedAlternatingProducts, JoinedProducts, SideBySide
from fusion.codegen.triton.forms.single_kernel import SINGLE_KERNEL

SEVERAL: tuple[type[Form], ...] = (JoinedAlternatingProducts, JoinedProducts, SideBySide, LastBlock)
"""The forms of launches of several kernels."""

FORMS: tuple[type[Form], ...] = (*SEVERAL, *SINGLE_KERNEL)
"""All forms, the preferred one first."""


def candidates(task: Task) -> tuple[Choice, ...]:
    """Return forms and configurations worth timing for a kernel, the default first."""
    several = _several(task)
    if several is not None:
        return tuple((several, config) for config in several.configs())
    return single_kernel.candidates(task)


def form_of(task: Task, config: Config) -> Form:
    """Return the form that computes a kernel in a configuration.

    Raises:
        ValueError: no form supports it.
    """
    return _several(task) or single_kernel.taking(task, config)


def _several(task: Task) -> Form | None:
    """Return the plan for a launch of several kernels; None for a kernel that is alone."""
    plans = (form.applies(task) for form in SEVERAL)
    return next((plan for plan in plans if not isinstance(plan, Refused)), None)


__all__ = ["FORMS", "SEVERAL", "SINGLE_KERNEL", "Choice", "Form", "Refused", "Task", "candidates", "form_of"]
