"""The reference target, held to the protocol that every target keeps."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

import fusion.codegen.build
from fusion.codegen.build import KernelBuilder
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.target import Launcher, Target
from fusion.codegen.targets import builder_for
from fusion.lowering.errors import BuildError, VerifyError
from fusion.lowering.ir.expr import Const, Load
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Role, Store
from fusion.lowering.ir.scalar_ops import FOLD_OPS
from tests.lowering.building import F32, I0, LENGTH, R0, kernel, param


def row_means(name: str = "k") -> Kernel:
    total = Fold("sum0", "sum", (Load("x", (8 * I0 + R0,), F32),), (R0,), F32)
    example = kernel(
        [param("x", (LENGTH, 8)), param("out", (LENGTH,), written=True)],
        {I0: (LENGTH, Role.GRID), R0: (8, Role.WHOLE)},
        total,
        Store("out", I0, op("truediv", total.ref, Const(8.0, F32))),
        sizes=(LENGTH,),
    )
    return replace(example, name=name)


def test_it_keeps_the_protocol_and_can_do_everything() -> None:
    target: Target = ReferenceTarget()
    assert target.name == "reference"
    assert target.capabilities.fold_ops == set(FOLD_OPS)
    assert isinstance(builder_for("cpu", "reference").target, ReferenceTarget)


def test_it_runs_a_kernel_in_place() -> None:
    target, example = ReferenceTarget(), row_means()
    launch = target.build(example, target.emit(example))
    for rows in (3, 1, 0):
        x, out = torch.randn(rows, 8), torch.full((rows,), float("nan"))
        assert launch(x, out, rows) is None
        torch.testing.assert_close(out, x.mean(1))


def test_equal_kernels_have_equal_sources() -> None:
    target = ReferenceTarget()
    assert target.emit(row_means()) == target.emit(row_means())
    assert target.emit(row_means()) != target.emit(row_means("other"))
    assert list(target.stages(row_means(), target.emit(row_means()))) == []


def test_an_edited_source_is_refused() -> None:
    target, example = ReferenceTarget(), row_means()
    with pytest.raises(BuildError, match="not their text"):
        target.build(example, target.emit(example).replace("8.0", "9.0"))


def test_a_malformed_kernel_is_refused() -> None:
    example = replace(row_means(), body=row_means().body[::-1])
    with pytest.raises(VerifyError, match="sum0 is named before its fold"):
        ReferenceTarget().build(example, ReferenceTarget().emit(example))


def test_an_access_outside_is_refused_when_it_happens() -> None:
    example = row_means()
    example = replace(example, body=(example.body[0], replace(example.body[1], offset=2 * I0)))  # type: ignore[arg-type]
    launch = ReferenceTarget().build(example, ReferenceTarget().emit(example))
    launch(torch.randn(1, 8), torch.empty(1), 1)
    with pytest.raises(VerifyError, match="outside"):
        launch(torch.randn(3, 8), torch.empty(3), 3)


def test_the_builder_builds_equal_kernels_once() -> None:
    built = KernelBuilder(ReferenceTarget()).build([row_means(), row_means("other"), row_means()])
    assert built[0] is built[2]
    assert built[0] is not built[1]


def test_the_builder_keeps_the_most_recent_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion.codegen.build, "MOST_CACHED", 2)
    builder = KernelBuilder(ReferenceTarget())
    one, two = builder.build([row_means("one"), row_means("two")])
    assert builder.build([row_means("one")]) == [one]
    builder.build([row_means("three")])
    assert builder.build([row_means("one")])[0] is one
    assert builder.build([row_means("two")])[0] is not two


def test_the_builder_goes_on_while_kernels_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are available at once; a failed build is raised to its waiters, and retried at the next request."""
    target, going, build = ReferenceTarget(), threading.Event(), ReferenceTarget.build

    def refuse(example: Kernel, source: str) -> Launcher:
        assert going.wait(60)
        raise BuildError("no compiler")

    monkeypatch.setattr(target, "build", refuse)
    builder = KernelBuilder(target)
    building = builder.begin([row_means()])
    assert building.sources == {row_means(): target.emit(row_means())}
    going.set()
    with pytest.raises(BuildError, match="no compiler"):
        building.wait()
    monkeypatch.setattr(target, "build", partial(build, target))
    assert builder.build([row_means()])[0].source == building.sources[row_means()]


def test_the_builder_writes_nothing_for_an_empty_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = kernel(
        [param("x", (5, 0)), param("out", (5, 0), written=True)],
        {I0: (0, Role.GRID)},
        Store("out", I0, op("neg", Load("x", (I0,), F32))),
    )
    target = ReferenceTarget()
    monkeypatch.setattr(target, "emit", lambda result: pytest.fail("it has nothing to do"))
    (built,) = KernelBuilder(target).build([empty])
    built.launch(torch.empty(5, 0), torch.empty(5, 0))
    assert "nothing" in built.source
