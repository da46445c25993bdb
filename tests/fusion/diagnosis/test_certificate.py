"""Certificates: what is right holds, and planted faults are found, on the inputs on which they show, and named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
import fusion.codegen.c.target
from fusion import stages
from fusion.codegen import targets
from fusion.compilation import autograd
from fusion.diagnosis.adversarial import hostile
from fusion.inspect.certificate import GENERATED, Certificate
from fusion.lowering.ir.expr import Const, Op, make_op, rewrite
from fusion.lowering.ir.program import Map, Program, Reduce, with_exprs
from fusion.runner import adapters
from fusion.runner.contexts import Joint
from tests.fusion.planted import plant_in_pass, plant_in_results, plant_in_text
from tests.fusion.runner.programs import classified


@pytest.fixture(autouse=True)
def _unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Builds of these tests are not for others."""
    monkeypatch.setattr(targets, "_builders", {})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def certified(program: Callable[..., object], *args: object, **settings: Any) -> Certificate:
    certificate = fusion.explain(program, verify=True, **settings)(*args).certificate
    assert certificate is not None
    return certificate


def x_of(*shape: int, **settings: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), **settings)


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(torch.tanh(x), x.shape[1:])


def attention(q: Tensor, k: Tensor, v: Tensor, held: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).masked_fill(~held, -math.inf)
    return torch.softmax(scores, -1) @ v


# What holds -----------------------------------------------------------------------------------------------------------


def test_a_program_without_faults_holds() -> None:
    certificate = certified(lambda x: torch.softmax(torch.tanh(x) @ x, -1).cumsum(0), x_of(64, 64))
    assert certificate.holds and not certificate.broken
    assert {each.own.kernel for each in certificate.launches} >= {"tanh"}
    names = {check.name for check in certificate.checks}
    assert {GENERATED, "launches/make_kernels"} <= names
    tried = {kind for check in certificate.checks for kind in check.tried}
    assert {"large means", "denormals", "ties", "an infinity in input 0", "a row of input 0 masked out"} <= tried
    assert "certificate: holds" in str(certificate)


@pytest.mark.parametrize("target", ["c", "reference"])
def test_attention_in_training_holds(target: str) -> None:
    q, k, v = (x_of(2, 12, 8).requires_grad_() for _ in range(3))
    held = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) > 0.3
    certificate = certified(attention, q, k, v, held, options={"target": target})
    assert certificate.holds, certificate
    assert len(certificate.agreement.values) == 4
    assert all(check.tried for check in certificate.checks if not check.reason)
    assert q.grad is None


def test_half_precision_holds() -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40)).bfloat16()
    assert certified(model, x_of(12, 24).bfloat16()).holds


def test_sizes_may_be_symbols() -> None:
    assert certified(lambda x: torch.softmax(x.exp(), 0).sum(1), x_of(17, 5), dynamic=True).holds


def test_positions_are_not_invented() -> None:
    """An index is computed or in bounds; a library call that takes some is not checked by itself."""
    pool = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2))
    certificate = certified(pool, x_of(2, 1, 9, 9).requires_grad_())
    assert certificate.holds
    table = x_of(9, 5).requires_grad_()
    assert certified(lambda table, ids: table[ids].cumsum(0), table, torch.tensor([3, 8, 3])).holds


def test_the_state_of_the_program_stays() -> None:
    """The program itself runs once."""
    model = nn.BatchNorm1d(5)
    assert certified(model, x_of(8, 5)).holds
    assert int(model.num_batches_tracked) == 1


def unchecked(certificate: Certificate) -> dict[str, str]:
    return {check.name: check.reason for check in certificate.checks if check.reason}


def dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.dropout(torch.tanh(x), 0.5, True).cumsum(0) * 2, x.exp() + 1


@pytest.mark.parametrize("needs_gradients", [False, True], ids=["inference", "training"])
def test_random_programs_are_checked_with_the_numbers_that_they_draw(needs_gradients: bool) -> None:
    certificate = certified(dropped, x_of(40, 3).requires_grad_(needs_gradients))
    assert certificate.holds and not unchecked(certificate), certificate
    assert "not compared with eager, as it is random: result[0]" in certificate.agreement.note
    assert "result[0]" not in {value.name for value in certificate.agreement.values}
    assert "result[1]" in {value.name for value in certificate.agreement.values}
    assert any("dropout" in " ".join(check.origins) and check.tried for check in certificate.checks)


def test_a_fault_behind_random_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(expr: Any) -> Any:
        if isinstance(expr, Op) and expr.name == "exp":
            return make_op("exp", make_op("mul", expr.args[0], Const(1.01, expr.dtype)))
        return None

    plant_in_pass(monkeypatch, "round_on_store", lambda program: changed(program, larger))
    certificate = certified(lambda x: torch.dropout(x, 0.5, True).exp().cumsum(0), x_of(40, 3))
    assert certificate.agreement.agrees, "nothing that is not random"
    assert "program/round_on_store" in {check.name for check in certificate.broken}


def test_what_surrounds_a_library_call_of_positions_is_checked() -> None:
    """Positions are not invented: the call's results are, and what is computed of them is compared."""
    pool = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.Tanh())
    certificate = certified(pool, x_of(2, 1, 9, 9).requires_grad_())
    assert certificate.holds and not unchecked(certificate), certificate


def test_integers_are_compared_for_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    def four(expr: Any) -> Any:
        return replace(expr, value=4) if isinstance(expr, Const) and expr.value == 3 else None

    plant_in_pass(monkeypatch, "round_on_store", lambda program: changed(program, four))
    certificate = certified(lambda x: (x.argmax(1) + 3) * 2, x_of(20, 5))
    broken = {fault.what for check in certificate.broken for fault in check.faults}
    assert any("of the elements differ" in what for what in broken), certificate


@torch.library.custom_op("certificates::added", mutates_args=("x",))
def added(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def test_calls_that_change_their_operands_are_checked() -> None:
    """They get copies: a part that is evaluated before and after them reads what the program reads there."""

    def around(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        summed = y.exp().cumsum(0)
        before = (summed * 2).softmax(-1)
        added(summed, x.tanh())
        return before, before + (summed * 3).softmax(-1)

    certificate = certified(around, x_of(4, 5), x_of(4, 5))
    assert certificate.holds and not unchecked(certificate), certificate
    assert all(check.tried for check in certificate.checks)


def test_attention_of_a_library_is_a_call_like_others() -> None:
    """Its operation is marked as random, and draws only with dropout."""

    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(torch.tanh(q), k, v).exp() * 2

    q, k, v = (x_of(1, 2, 40, 16).requires_grad_() for _ in range(3))
    certificate = certified(scaled, q, k, v)
    assert certificate.holds and not unchecked(certificate), certificate


def test_the_gradient_of_a_loss_holds() -> None:
    """Its sums over one-hot rows become their only term, which is an infinity where zeros times one are NaN."""

    def loss(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ w.T, ids)

    certificate = certified(loss, x_of(3, 5).requires_grad_(), x_of(7, 5).requires_grad_(), torch.tensor([1, 4, 0]))
    assert certificate.holds, certificate
    assert "program/select_terms" in {check.name for check in certificate.checks if check.tried}


def test_calls_in_chunks_are_checked() -> None:
    given = x_of(70, 260), x_of(303, 260), torch.arange(70)
    certificate = certified(classified, *given, options={"target": "c", "workspace": 1 << 15})
    assert certificate.holds, certificate
    (chunks,) = [check for check in certificate.checks if check.name == "program/chunk_products"]
    assert len(chunks.tried) > 3 and not chunks.reason


def test_large_parts_are_checked_on_fewer_kinds_of_inputs() -> None:
    def deep(x: Tensor) -> Tensor:
        for k in range(130):
            x = torch.tanh(x.cumsum(0) * (k + 1) / 100)
        return x

    certificate = certified(deep, x_of(6, 4))
    assert certificate.holds and not unchecked(certificate), certificate
    assert min(len(check.tried) for check in certificate.checks) >= 2


def test_a_program_without_kernels_has_nothing_to_certify() -> None:
    certificate = certified(lambda x: x, x_of(3))
    assert certificate.holds and not certificate.launches and not certificate.checks
    assert "no kernel was generated" in certificate.agreement.note


# What a kernel contributes --------------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_named_with_what_it_contributes(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_results(monkeypatch, "sigmoid")
    x = x_of(64, 64).abs()
    certificate = certified(lambda x: torch.tanh(torch.sigmoid(x) @ x / 1000) @ x, x)
    assert not certificate.holds and not certificate.agreement.agrees
    worst, *others = certificate.worst
    assert "sigmoid" in worst.own.kernel and not worst.own.is_right
    assert worst.contribution == pytest.approx(1e-3, rel=0.1) and worst.result == "result"
    assert all(each.contribution < 1e-5 and each.own.is_right for each in others)
    assert [check.name for check in certificate.broken] == [GENERATED]
    text = str(certificate)
    assert "DOES NOT HOLD" in text and "WRONG: kernel sigmoid" in text and "sigmoid (test_certificate.py:" in text


def test_the_contribution_is_of_the_launch_alone() -> None:
    """A constant results from a kernel's numbers times zero: its error contributes nothing."""
    certificate = certified(lambda x: torch.tanh(x).cumsum(0) @ torch.zeros(40, 3), x_of(50, 40))
    assert certificate.launches and all(each.contribution == 0 for each in certificate.launches)


# Planted faults -------------------------------------------------------------------------------------------------------


def with_raw_moments(program: Program) -> Program:
    """The program with the sum of squares about the mean as the sum of squares less that of the mean.

    Right by algebra, and a loss of all digits where the mean is large.
    """
    sums = [node for node in program.nodes if isinstance(node, Reduce) and node.op == "sum"]
    for node in sums:
        (value,) = node.args
        if isinstance(value, Op) and value.name == "mul" and value.args[0] == value.args[1]:
            (apart,) = {*value.args}
            if isinstance(apart, Op) and apart.name == "sub":
                x, mean = apart.args
                raw = make_op("sub", make_op("mul", x, x), make_op("mul", mean, mean))
                return program.edited([replace(node, args=(raw,)) if each is node else each for each in program.nodes])
    return program


def test_a_variance_from_raw_moments_breaks_with_large_means(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_pass(monkeypatch, "round_on_store", with_raw_moments)
    certificate = certified(lambda x: x.var(1), x_of(20, 64))
    assert not certificate.holds and certificate.agreement.agrees, "on the inputs of the user nothing shows"
    (broken,) = certificate.broken
    assert broken.name == "program/round_on_store" and {fault.inputs for fault in broken.faults} == {"large means"}
    assert "BREAKS: program/round_on_store" in str(certificate) and "var (test_certificate.py:" in str(broken)


def changed(program: Program, change: Callable[[Any], Any]) -> Program:
    nodes = list(program.nodes)
    for k, node in enumerate(nodes):
        if isinstance(node, (Map, Reduce)):
            values = rewrite(node.exprs, change)
            nodes[k] = node if tuple(values) == tuple(node.exprs) else with_exprs(node, [*values])
    same = all(new is old for new, old in zip(nodes, program.nodes, strict=True))
    return program if same else program.edited(nodes)


def product_for_choice(expr: Any) -> Any:
    """A choice between a number and zero as a product with 1 or 0."""
    if isinstance(expr, Op) and expr.name == "where" and isinstance(expr.args[2], Const) and expr.args[2].value == 0:
        condition, value, _ = expr.args
        one, zero = (replace(expr.args[2], value=number) for number in (1.0, 0.0))
        return make_op("mul", value, make_op("where", condition, one, zero))
    return None


def test_a_product_in_place_of_a_choice_breaks_with_infinities(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_pass(monkeypatch, "round_on_store", lambda program: changed(program, product_for_choice))
    held = torch.ones(20, 64, dtype=torch.bool)
    certificate = certified(lambda x, held: torch.where(held, x, 0.0).sum(1), x_of(20, 64), held)
    assert certificate.agreement.agrees and not certificate.holds
    (broken,) = certificate.broken
    assert broken.name == "program/round_on_store"
    assert {fault.inputs for fault in broken.faults} >= {"a row of input 1 masked out"}


def test_a_text_that_is_wrong_for_denormals_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_text(monkeypatch, "0.5f", "0.5f + 1e-38f")
    certificate = certified(lambda x: x * 0.5, x_of(20, 64))
    assert certificate.agreement.agrees and not certificate.holds
    (broken,) = certificate.broken
    assert broken.name == GENERATED and {fault.inputs for fault in broken.faults} == {"denormals"}


def test_loops_that_forget_a_maximum_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a softmax begin their maximum at 0, and not at −∞."""
    of_cluster = adapters.kernels_of

    def kernels_of(*given: Any) -> Any:
        steps, refusals = of_cluster(*given)
        return [_from_zero(step) for step in steps], refusals

    monkeypatch.setattr(adapters, "kernels_of", kernels_of)
    certificate = certified(lambda x: x.amax(1), x_of(20, 64))
    assert certificate.agreement.agrees and not certificate.holds
    (broken,) = certificate.broken
    assert broken.name == "launches/make_kernels"
    assert "a row of input 0 masked out" in {fault.inputs for fault in broken.faults}


def _from_zero(step: Any) -> Any:
    from fusion.lowering.ir.kernel import Fold, map_statements

    def floored(stmt: Any) -> Any:
        if isinstance(stmt, Fold) and stmt.op == "max":
            (value,) = stmt.args
            return replace(stmt, args=(make_op("maximum", value, Const(-1e4, value.dtype)),))
        return stmt

    kernel = step.kernel
    return replace(step, kernel=replace(kernel, body=map_statements(kernel.body, floored)))


def test_a_wrong_pass_over_the_joint_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_sines(joint: Joint, at: object) -> None:
        for node in joint.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.replace_all_uses_with(node.args[0])

    wrong = stages.in_place("wrong", without_sines)
    monkeypatch.setattr(autograd, "JOINT", replace(stages.JOINT, passes=(wrong, *stages.JOINT.passes)))
    certificate = certified(lambda x: x.sin().cumsum(0), x_of(20, 3).requires_grad_())
    assert not certificate.holds
    assert {check.name for check in certificate.broken} == {"joint/wrong"}


# Data -----------------------------------------------------------------------------------------------------------------


def test_the_certificate_is_part_of_the_document() -> None:
    plain = fusion.explain(normed)(x_of(6, 40))
    assert plain.certificate is None and plain.json()["certificate"] is None
    explanation = fusion.explain(normed, verify=True)(x_of(6, 40))
    assert explanation.certificate is not None and str(explanation.certificate) in str(explanation)
    entry = json.loads(json.dumps(explanation.json()))["certificate"]
    assert entry["holds"] and [value["name"] for value in entry["values"]] == ["result"]
    assert [launch["kernel"] for launch in entry["launches"]] == [k.name for k in explanation.kernels]
    assert all(launch["error"] < 1e-6 for launch in entry["launches"])
    assert {check["name"] for check in entry["checks"]} >= {GENERATED}


def test_hostile_inputs_keep_layouts_and_integers() -> None:
    gapped = torch.randn(4, 12)[:, ::2]
    expanded = torch.randn(3, 1).expand(3, 5)
    whole = torch.arange(6)
    for kind, tensors in hostile([gapped, expanded, whole]):
        assert [each.stride() for each in tensors] == [each.stride() for each in (gapped, expanded, whole)], kind
        assert torch.equal(tensors[2], whole)
    assert torch.equal(dict(hostile([gapped, expanded]))["as given"][0], gapped)


def test_loads_of_equal_names_are_not_mixed_up() -> None:
    """Two layers of one shape are checked once, one of another shape by itself."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(n), nn.Tanh()) for n in (16, 16)))
    counts = [
        sum(check.name == GENERATED for check in certified(model[:layers], x_of(8, 16)).checks) for layers in (1, 2)
    ]
    assert counts[0] <= counts[1] <= counts[0] + 1
