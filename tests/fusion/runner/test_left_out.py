"""Programs keep their values without any pass that can be left out, and each of these can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusion import stages
from fusion.backend import Backend
from fusion.compilation.region import compile_anew
from fusion.inspect.agreement import largest_error
from fusion.options import Options
from fusion.schedule.overrides import GROW_CLUSTERS, Overrides
from tests.fusion.runner.programs import CASES, Case, given

EVALUATED = Overrides(evaluated=True)

RANDOM = {"checkpoint", "repeated"}
"""Programs that draw other random numbers than eager; they are compared with themselves under all passes."""

UNSEEN = {
    "program/bound_masks": "folds a mask where that takes little beside its scores: more than are evaluated here",
    "launches/reduce_in_last_block": "needs the parts of a product of more numbers than are evaluated here",
}
"""Optional passes that run for none of these programs, with the reason."""


def values(case: Case, overrides: Overrides | None) -> tuple[list[Tensor], set[str]]:
    """Return results, changed inputs and gradients of a case, and the optional passes that may have changed it.

    Without overrides it runs in eager.
    """
    inputs, ran, function = given(case), set[str](), case.function
    backend = Backend(replace(Options.read(None, case.options), strict=True), overrides=overrides or EVALUATED)
    if overrides is not None:
        function = compile_anew(function, backend, dynamic=case.dynamic)
    torch.manual_seed(0)
    with torch.set_grad_enabled(case.backward):
        results = [each for each in pytree.tree_leaves(function(*inputs)) if isinstance(each, Tensor)]
        if case.backward:
            torch.stack([each.double().sin().sum() for each in results if each.requires_grad]).sum().backward()
    for report in backend.reports:
        assert not report.failure, report.failure
        ran |= {f"{each.stage}/{each.name}" for each in report.passes if each.changed is not False}
    given_tensors = [each for each in inputs if isinstance(each, Tensor)]
    gradients = [each.grad for each in given_tensors if each.is_leaf and each.grad is not None]
    return [each.detach() for each in (*results, *given_tensors, *gradients)], ran & {*stages.OPTIONAL, GROW_CLUSTERS}


def faults(case: Case, without: frozenset[str], expected: list[Tensor]) -> Iterator[str]:
    """Yield how values differ without some passes."""
    try:
        got, _ = values(case, replace(EVALUATED, without=without))
    except Exception as error:
        yield f"{type(error).__name__}: {str(error)[:300]}"
        return
    assert len(got) == len(expected)
    for k, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        wide = torch.finfo(theirs.dtype).eps ** 0.5 if theirs.is_floating_point() else 0.0
        if largest_error(ours, theirs) > wide * (1 + float(theirs.double().abs().nan_to_num(posinf=0).max())):
            yield f"value {k} is off by {largest_error(ours, theirs):.1e}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_optional_pass_can_be_left_out() -> None:
    wrong: list[str] = []
    seen: set[str] = set()
    for name, case in CASES.items():
        _, ran = values(case, EVALUATED)
        expected, _ = values(case, EVALUATED if name in RANDOM else None)
        tried = [frozenset(stages.OPTIONAL), *(frozenset([each]) for each in sorted(ran - seen))]
        for without in tried:
            wrong += [
                f"{name} without {', '.join(sorted(without))[:80]}: {each}" for each in faults(case, without, expected)
            ]
        seen |= ran
    assert not wrong, "\n".join(wrong)
    assert {*stages.OPTIONAL} - seen == UNSEEN.keys()
