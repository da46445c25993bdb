"""Requirements on what is compiled: met, or refused with all reasons."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.inspect.required import _Blocks
from fusion.options import Options, Requirements

X = torch.linspace(-1, 2, 12).view(3, 4)


@pytest.fixture(autouse=True)
def _nothing_entered() -> Iterator[None]:
    yield
    assert not _Blocks.entered


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def twice(x: Tensor) -> Tensor:
    return torch.softmax(torch.softmax(x, 0), 1)


def called(x: Tensor) -> Tensor:
    return torch.linalg.matrix_exp(x @ x.T) + 1


def test_what_is_met_runs() -> None:
    fused = fusion.fuse(softmax, require={"kernels": 1, "externs": 0})
    torch.testing.assert_close(fused(X), softmax(X))
    torch.testing.assert_close(fusion.fuse(twice, require={"externs": 0})(X), twice(X))


def test_too_many_kernels_are_refused_with_reason_cost_and_line() -> None:
    fused = fusion.fuse(twice, require={"kernels": 1})
    with pytest.raises(fusion.NotAsRequired) as raised:
        fused(X)
    shown = str(raised.value)
    assert shown.startswith("inference has 2 kernels (allowed: 1):\n  kernel amax_sub_exp_sum_div: amax, ")
    assert "not fused div → sub_1: a reduction is read across the axis that the other side reduces [" in shown
    assert " µs; sub_1 (test_required.py:" in shown
    assert isinstance(raised.value, fusion.FusionError)
    assert raised.value.report is not None and len(raised.value.report.kernels) == 2


def test_too_many_externs_are_refused_with_reason_and_line() -> None:
    fused = fusion.fuse(called, require={"externs": 0})
    with pytest.raises(fusion.NotAsRequired, match=r"has 1 extern \(allowed: 0\)") as raised:
        fused(X)
    shown = str(raised.value)
    assert "extern aten.linalg_matrix_exp.default: no rule; linalg_matrix_exp (test_required.py:" in shown
    assert "\n  kernel " not in shown and "not fused" not in shown


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_half_of_training_is_a_graph_of_its_own(dynamic: bool | None) -> None:
    x = X.clone().requires_grad_()
    fusion.fuse(softmax, require={"kernels": 1, "externs": 0})(x).sum().backward()

    square = torch.eye(40, requires_grad=True)
    fused = fusion.fuse(lambda x: torch.linalg.matrix_exp(x).sin() * x, dynamic=dynamic, require={"kernels": 1})
    with pytest.raises(fusion.NotAsRequired, match=r"^backward has \d kernels \(allowed: 1\)"):
        fused(square).sum().backward()


def test_a_region_that_runs_eagerly_meets_no_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise fusion.Unsupported("no such thing")

    monkeypatch.setattr(fusion.stages, "share_seeds", refuse)
    x = X.clone().requires_grad_()
    with pytest.raises(fusion.NotAsRequired, match="captured runs eagerly: Unsupported: no such thing"):
        fusion.fuse(lambda x: x.exp() + 1, require={"kernels": 5})(x)


def test_what_comes_from_the_cache_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    options = {"graph_cache": True}
    fusion.fuse(twice, options=options)(X)
    for _ in range(2):
        torch._dynamo.reset()
        with pytest.raises(fusion.NotAsRequired, match="from the cache"):
            fusion.fuse(twice, options=options, require={"kernels": 1})(X)


def test_modules_and_their_copies_keep_requirements() -> None:
    model = nn.Sequential(nn.Softmax(0), nn.Softmax(1))
    fused = fusion.fuse(model, require={"kernels": 1})
    for each in (fused, copy.deepcopy(fused)):
        with torch.no_grad(), pytest.raises(fusion.NotAsRequired, match=r"2 kernels \(allowed: 1\)"):
            each(X)
    decorated = fusion.fuse(require={"kernels": 1})(twice)
    with pytest.raises(fusion.NotAsRequired):
        decorated(X)


def test_requirements_go_through_torch_compile() -> None:
    compiled = torch.compile(twice, backend="fusion", options={"require": {"kernels": 1}})
    with pytest.raises(fusion.NotAsRequired):
        compiled(X)


# Blocks ---------------------------------------------------------------------------------------------------------------


def test_a_block_checks_what_was_compiled_before_it() -> None:
    fused = fusion.fuse(twice)
    fused(X)
    with pytest.raises(fusion.NotAsRequired, match=r"2 kernels \(allowed: 1\)"), fusion.require(kernels=1, externs=0):
        fused(X)
    with fusion.require(kernels=2, externs=0):
        torch.testing.assert_close(fused(X), twice(X))
    fused(X)


def test_a_block_in_which_nothing_is_compiled_is_refused() -> None:
    with pytest.raises(fusion.NotAsRequired, match="nothing was compiled"), fusion.require(kernels=1):
        softmax(X)


def test_an_error_within_a_block_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), fusion.require(kernels=1):
        _ = 1 / 0


def test_blocks_are_nested() -> None:
    fused = fusion.fuse(softmax)
    with fusion.require(externs=0), fusion.require(kernels=1):
        fused(X)
    with (
        pytest.raises(fusion.NotAsRequired, match=r"1 kernel \(allowed: 0\)"),
        fusion.require(kernels=0),
        fusion.require(externs=0),
    ):
        fused(X)


# Errors ---------------------------------------------------------------------------------------------------------------

WRONG: list[tuple[object, type[Exception], str]] = [
    ({"kernel": 1}, ValueError, "unknown requirement 'kernel'; known: kernels, externs"),
    ({"kernels": -1}, ValueError, "kernels must not be negative, got -1"),
    ({"kernels": 1.0}, TypeError, "kernels must be a number, got float"),
    ({"externs": True}, TypeError, "externs must be a number, got bool"),
    ({}, ValueError, "nothing is required"),
    (1, TypeError, "require must be a mapping, got int"),
]


@pytest.mark.parametrize(("given", "kind", "message"), WRONG)
def test_wrong_requirements_are_refused(given: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fusion.fuse(softmax, require=given)
    with pytest.raises(kind, match=message):
        Options.read(None, {"require": given})


def test_a_block_takes_numbers() -> None:
    with pytest.raises(ValueError, match="nothing is required"), fusion.require():
        pass
    with pytest.raises(TypeError, match="kernels must be a number"), fusion.require(kernels="1"):  # type: ignore[arg-type]  # refused
        pass


def test_requirements_are_options() -> None:
    assert Options.read(None, {"require": {"kernels": 1}}).require == Requirements(kernels=1)
    assert hash(Options.read(None, {"require": {"kernels": 1}})) != hash(Options.read())
