"""`accuracy`: the error of each kernel against float64 on its inputs."""

from __future__ import annotations

import math

import pytest
import torch

import fusion
import fusion.codegen.c.target
from fusion.inspect.accuracy import LaunchError, watching
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Role, Store
from fusion.schedule.kernels import KernelCall
from tests.fusion.planted import plant_in_results
from tests.lowering.building import F32, I0, kernel, param

HALF = torch.bfloat16


@pytest.fixture
def tanh_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_in_results(monkeypatch, "tanh")


def steps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.tanh(torch.sigmoid(x) @ w) @ w, -1)


@pytest.mark.usefixtures("tanh_is_off")
def test_an_error_is_attributed_to_its_kernel() -> None:
    report = fusion.accuracy(steps)(torch.randn(40, 32), torch.randn(32, 32))
    worst, *others = report.worst
    assert "tanh" in worst.kernel and worst.error == pytest.approx(1e-3, rel=0.01) and worst.rounding < 1e-6
    assert any("tanh (test_accuracy.py:" in origin for origin in worst.origins)
    assert others and all(launch.error < 1e-6 for launch in others)
    assert report.launches[-1].kernel != worst.kernel  # the reader of the wrong numbers is right
    assert str(report).startswith(f"WRONG: kernel {worst.kernel}, out0: error 1.0e-03, by its dtypes ")


def test_kernels_that_are_right_are_as_exact_as_their_dtypes() -> None:
    """Forward and backward, rounded to 16 bits; the caller's gradients are unchanged."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.LayerNorm(96)).to(HALF)
    report = fusion.accuracy(model)(torch.randn(32, 64, dtype=HALF))
    assert any("backward" in launch.kernel for launch in report.launches)
    assert all(launch.error <= 1.1 * launch.rounding + 1e-6 for launch in report.launches)
    assert max(launch.error for launch in report.launches) > 1e-4
    assert all(parameter.grad is None for parameter in model.parameters())


def test_integers_and_numbers_that_are_not_finite() -> None:
    x = torch.tensor([[1.0, math.inf], [math.nan, 2.0], [3.0, -math.inf]])
    report = fusion.accuracy(lambda x: (x * 2, (x * 2).argmax(-1)))(x)
    assert [launch.error for launch in report.launches] == [0.0, 0.0]


def test_elements_that_a_kernel_does_not_write_are_not_counted() -> None:
    """Half of a tensor is written; the rest of it is huge, and would hide any error."""
    x, out = torch.randn(5), torch.full((10,), 1e30)
    store = Store("out", I0, op("exp", Load("x", (I0,), F32)))
    example = kernel([param("x", (5,)), param("out", (10,), written=True)], {I0: (5, Role.GRID)}, store)
    results: list[LaunchError] = []

    def launch(x: torch.Tensor, out: torch.Tensor) -> None:
        out[:5] = 1.001 * x.exp()

    watching(results.append)(KernelCall(example, ("x", "out"), ("out",), (), 20, 40, 5), launch)(x, out)
    assert len(results) == 1 and results[0].error == pytest.approx(1e-3, rel=0.01) and results[0].rounding < 1e-6


def test_symbolic_sizes_and_products_in_chunks() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ w, t)

    given = torch.randn(48, 16, requires_grad=True), torch.randn(16, 500), torch.randint(500, (48,))
    report = fusion.accuracy(loss, dynamic=True, options={"workspace": 1 << 14})(*given)
    assert report.launches and all(launch.error < 1e-5 for launch in report.launches)


def test_programs_that_cannot_run_are_refused() -> None:
    with pytest.raises(TypeError, match=r"accuracy takes an nn.Module or a function"):
        fusion.accuracy(torch.nn.Linear)
    with pytest.raises(TypeError, match="accuracy takes mode, dynamic, fullgraph and options"):
        fusion.accuracy(torch.relu, target="c")


def test_a_program_without_kernels_is_reported() -> None:
    assert str(fusion.accuracy(lambda x: x)(torch.ones(2))) == "no kernel was launched"
