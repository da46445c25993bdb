"""Planted faults: each is found, by the kernel or by the pass."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fusion
from fusion import stages
from fusion.codegen.targets import _builders
from fusion.diagnosis.bisection import Bisection, first_failing
from fusion.inspect.agreement import Agreement, ComparedValue
from fusion.lowering.ir.expr import Const, Expr, const, rewrite
from fusion.lowering.ir.program import Map, Program, Reduce, with_exprs
from fusion.lowering.registry import RULES
from fusion.runner import adapters
from fusion.schedule.overrides import GROW_CLUSTERS
from tests.fusion.planted import plant_in_pass, plant_in_text

LAYERS = 100
FACTORS = [1 + k / 64 for k in range(LAYERS)]
TURN = 37
"""The layer with the fault."""


@pytest.fixture(autouse=True)
def _unbuilt() -> Iterator[None]:
    """Build every kernel anew, before and after: a planted text must neither be missed nor left behind."""
    _builders.clear()
    torch._dynamo.reset()
    yield
    _builders.clear()
    torch._dynamo.reset()


def layers(x: Tensor, factors: list[float] = FACTORS) -> Tensor:
    for k, factor in enumerate(factors):
        x = torch.softmax(x * factor, dim=k % 2) + x
    return x


def few(x: Tensor) -> Tensor:
    return layers(x, FACTORS[TURN - 1 : TURN + 1])


def x_of(*shape: int, **settings: object) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), **settings)  # type: ignore[arg-type]  # dtype and the like


def with_wrong_factor(program: Program) -> Program:
    def changed(expr: Expr) -> Expr | None:
        is_it = isinstance(expr, Const) and expr.value == FACTORS[TURN]
        return const(FACTORS[TURN] + 0.25, expr.dtype) if is_it and isinstance(expr, Const) else None

    nodes = list(program.nodes)
    for k, node in enumerate(nodes):
        if isinstance(node, (Map, Reduce)):
            values = rewrite(node.exprs, changed)
            nodes[k] = node if tuple(values) == tuple(node.exprs) else with_exprs(node, [*values])
    same = all(new is old for new, old in zip(nodes, program.nodes, strict=True))
    return program if same else program.edited(nodes)


def test_nothing_is_found_where_results_agree() -> None:
    found = fusion.bisect(few)(x_of(40, 36))
    assert found.agrees and found.kernel is None and not found.culprit
    assert found.compilations == 1
    assert "all results agree" in str(found)


@pytest.mark.slow
def test_a_wrong_kernel_among_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_text(monkeypatch, str(FACTORS[TURN]), "1.75")
    start = time.process_time()  # other work of the machine does not count
    found = fusion.bisect(layers)(x_of(40, 36))
    assert time.process_time() - start < 60
    assert not found.agrees
    assert found.compared >= LAYERS
    assert found.kernel is not None and any("softmax" in line or "mul_37" in line for line in found.kernel.origins)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_text(monkeypatch, str(FACTORS[TURN]), "1.75")
    found = fusion.bisect(few)(x_of(40, 36))
    assert not found.agrees and not found.culprit
    assert found.kernel is not None and not found.kernel.is_right
    assert "other numbers than its block program" in str(found)
    assert "mul_1" in str(found.kernel)


def test_a_kernel_whose_error_is_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is below what sums in another order may cause, so each kernel by itself may be right."""
    plant_in_text(monkeypatch, str(FACTORS[TURN]), "1.578128")
    x = x_of(40, 36, dtype=torch.float64)
    found = fusion.bisect(few)(x)
    assert not found.agrees and not found.culprit
    assert found.kernel is not None and found.kernel.is_right
    assert "the results agree once kernels run in the evaluator" in found.verdict
    assert "mul_1" in str(found.kernel)


@pytest.mark.parametrize("name", ["map_distinct_elements", "inline_cheap_maps", "round_on_store", "align_rows"])
def test_a_wrong_pass_is_found_with_the_kernel_that_it_changed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant_in_pass(monkeypatch, name, with_wrong_factor)
    found = fusion.bisect(few)(x_of(40, 36))
    assert not found.agrees and found.kernel is None
    assert found.culprit == f"program/{name}"
    assert found.changed is not None and "mul_1" in " ".join(found.changed.origins)
    assert found.compilations <= 12


@pytest.mark.slow
def test_a_wrong_pass_over_many_kernels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_pass(monkeypatch, "round_on_store", with_wrong_factor)
    start = time.process_time()  # other work of the machine does not count
    found = fusion.bisect(layers)(x_of(40, 36))
    assert time.process_time() - start < 60
    assert found.culprit == "program/round_on_store" and found.compared >= LAYERS
    assert found.changed is not None and "mul_37" in " ".join(found.changed.origins)


@pytest.mark.slow
def test_a_fault_of_training_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_pass(monkeypatch, "inline_cheap_maps", with_wrong_factor)
    found = fusion.bisect(few)(x_of(40, 36, requires_grad=True))
    assert found.culprit == "program/inline_cheap_maps"
    assert {value.name for value in found.agreement.differing} == {"result", "gradient of input[0]"}


def test_a_difference_that_no_pass_makes_is_said_to_be_rounding() -> None:
    found = fusion.bisect(lambda x: torch.softmax(x.exp(), -1), rtol=0.0)(x_of(40, 36))
    assert not found.agrees and found.kernel is None and not found.culprit
    assert "it is rounding" in found.verdict


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sin, cos = torch.ops.aten.sin.default, torch.ops.aten.cos.default
    monkeypatch.setitem(RULES, sin, RULES[cos])
    found = fusion.bisect(lambda x: (x.exp().sin() + 1).sum(0))(x_of(40, 36))
    assert not found.agrees and found.kernel is None and not found.culprit
    assert found.rule is not None and found.rule.name == "aten.sin.default"
    assert "test_bisection.py:" in str(found.rule)
    assert "the rule of this operation is wrong" in found.verdict


def test_a_wrong_pass_that_is_needed_is_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = adapters.grow
    monkeypatch.setattr(
        adapters, "grow", lambda program, *rest, **named: grow(with_wrong_factor(program), *rest, **named)
    )
    found = fusion.bisect(few)(x_of(40, 36))
    assert not found.agrees and found.kernel is None and not found.culprit and found.rule is None
    assert "a pass that is needed is wrong" in found.verdict


def test_the_growth_of_clusters_is_one_of_the_passes() -> None:
    assert (
        stages.OPTIONAL.index("program/inline_cheap_maps")
        < stages.OPTIONAL.index(GROW_CLUSTERS)
        < stages.OPTIONAL.index("launches/reduce_in_last_block")
    )
    assert not {"captured/keep_strides", "partitioned/drop_saved_results", "launches/make_kernels"} & {*stages.OPTIONAL}


@pytest.mark.parametrize("first", range(1, 12))
def test_the_first_failure_is_found(first: int) -> None:
    tried: list[int] = []

    def fails(count: int) -> bool:
        tried.append(count)
        return count >= first

    assert first_failing(11, fails) == first
    assert len(tried) <= 4


def test_many_differing_values_are_counted() -> None:
    values = tuple(ComparedValue(f"value {k}", 1.0, fault="it is wrong") for k in range(9))
    shown = str(Bisection(Agreement(values), "why")).splitlines()
    assert shown[6:] == ["… and 3 others", "why"]


def test_random_programs_are_refused() -> None:
    with pytest.raises(fusion.NotComparable, match="random numbers"):
        fusion.bisect(lambda x: torch.dropout(x, 0.5, True))(x_of(40))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="rtol must not be negative"):
        fusion.bisect(few, rtol=-1.0)
    with pytest.raises(ValueError, match="unknown reference 'float32'"):
        fusion.bisect(few, against="float32")
    with pytest.raises(TypeError, match="bisect takes mode"):
        fusion.bisect(few, tolerance=1.0)
