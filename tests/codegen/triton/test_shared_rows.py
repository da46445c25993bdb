"""Rows in shared memory: which kernels have that form, their text, and their numbers on a model of the language."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.codegen.triton.target import TritonTarget
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.triton import gluon_rows
from tests.golden.programs import BF16, F32, I64, Given, Program
from tests.golden.recording import kernels_for

F16 = torch.float16
ROWS = 300
"""More than two for each multiprocessor of an H200."""


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def losses(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def dropped_out(x: Tensor) -> Tensor:
    return F.dropout(x.softmax(-1), 0.1, training=True)


def with_places(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.argmax(-1), x.softmax(-1)


def looked_up(x: Tensor, table: Tensor, places: Tensor) -> Tensor:
    return torch.erf(x.softmax(-1) * table[places]) + torch.arange(x.shape[1]) % 3


def of_differences(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, (x - y).softmax(-1), y)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight)


def held(program: Program, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kernel, str]]:
    """The kernels of a program that hold rows in shared memory, for an H200, with their sources."""
    sources = kernels_for(program, "sm_90", monkeypatch)
    return [(kernel, source) for kernel, source in sources.items() if "gl.allocate_shared_memory" in source]


def numbers(dtype: torch.dtype, columns: int, *, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return (torch.randn(rows, columns, generator=generator) * 2 + 1).to(dtype)


@pytest.mark.parametrize("columns", [16384, 50257])
def test_logits_are_copied_once_and_folded_and_read_there(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(cross_entropy, (Given((8192, columns), BF16, True), Given((8192,), I64)), backward=True)
    ((kernel, source),) = held(program, monkeypatch)
    assert source.count("async_copy_global_to_shared(in0_row.index") == 1
    assert ".load(ROW)" in source
    loaded = [line for line in source.splitlines() if "tl.load(in0" in line]
    assert len(loaded) == 1
    assert "checked" in loaded[0]  # the logit of the target alone
    lines = [line.strip() for line in source.splitlines()]
    copied, awaited = (
        next(k for k, line in enumerate(lines) if line.startswith(f"hopper.async_copy.{part}_group"))
        for part in ("commit", "wait")
    )
    gathered = next(k for k, line in enumerate(lines) if "tl.load(in1_ptr" in line)
    assert copied < gathered < awaited  # while the row is on its way
    assert ("r_shift" in source) == (columns % 8 != 0)
    assert TritonTarget("sm_90").binary(kernel, source)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Given, ...]]] = {
    "softmax": (softmax, (Given((ROWS, 16384), BF16),)),
    "softmax of rows that begin within words": (softmax, (Given((ROWS, 20001), BF16),)),
    "softmax of float16": (softmax, (Given((ROWS, 10007), F16),)),
    "softmax of float32": (softmax, (Given((ROWS, 9001), F32),)),
    "log_softmax": (log_softmax, (Given((ROWS, 32000), BF16),)),
    "layer_norm": (layer_norm, (Given((ROWS, 20480), BF16), Given((20480,), BF16), Given((20480,), BF16))),
    "layer_norm of odd rows": (layer_norm, (Given((ROWS, 12289), F32), Given((12289,), F32), Given((12289,), F32))),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_agree_with_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs = CASES[name]
    ((kernel, source),) = held(Program(function, inputs), monkeypatch)
    shape, dtype = inputs[0].shape, inputs[0].dtype
    x = numbers(dtype, shape[1])
    others = [numbers(given.dtype, given.shape[0], rows=1)[0] for given in inputs[1:]]
    result = _run(kernel, source, [x, *others], x.shape)
    expected = function(x[SOME].double(), *(each.double() for each in others))
    torch.testing.assert_close(result.double(), expected, **_tolerance(dtype, expected))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (with_places, (Given((ROWS, 20001), BF16),)),
        (looked_up, (Given((ROWS, 20480), BF16), Given((99,), BF16), Given((20480,), I64))),
        (of_differences, (Given((ROWS, 12000), F32), Given((ROWS, 12000), BF16))),
    ],
    ids=["places", "look-ups", "two rows"],
)
def test_other_operations_compile(
    function: Callable[..., object], inputs: tuple[Given, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((kernel, source),) = held(Program(function, inputs), monkeypatch)
    assert TritonTarget("sm_90").binary(kernel, source)


def test_each_has_a_launch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(-1), y.softmax(-1)

    given = tuple(Given((ROWS, columns), BF16) for columns in (20001, 16384))
    assert len(held(Program(both, given), monkeypatch)) == 2


SOME = [0, 1, 7, 131, ROWS - 1]
"""The rows that are compared: the first, those after it, which begin elsewhere in a word, and the last."""


def _tolerance(dtype: torch.dtype, expected: Tensor) -> dict[str, float]:
    unit = torch.finfo(dtype).eps
    return {"rtol": unit, "atol": 4e-6 * float(expected.detach().abs().max())}


def _run(kernel: Kernel, source: str, args: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Some rows of the only result of a kernel whose parameters are `args`, in this order, then the result."""
    result = torch.full(shape, torch.nan, dtype=kernel.params[-1].dtype)
    gluon_rows.run(kernel, source, [*args, result], SOME)
    others = torch.ones(shape[0], dtype=torch.bool)
    others[SOME] = False
    assert bool(result[others].isnan().all()), "a program writes rows of others"
    return result[SOME]


@pytest.mark.parametrize("columns", [10000, 20001])
def test_losses_and_gradients_agree_with_float64(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, some = 2048, SOME[:-1]
    given = (Given((rows, columns), BF16, True), Given((rows,), I64))
    ((kernel, source),) = held(Program(cross_entropy, given, backward=True), monkeypatch)
    assert [param.shape for param in kernel.params] == [(rows, columns), (rows,), (), (rows,), (rows, columns)]
    x, target = numbers(BF16, columns, rows=rows), torch.arange(rows) * 67 % columns
    target[7], target[131] = -100, columns - 1
    scale, loss, gradient = (
        torch.tensor(0.5, dtype=BF16),
        torch.full((rows,), torch.nan, dtype=BF16),
        torch.empty_like(x),
    )
    gluon_rows.run(kernel, source, [x, target, scale, loss, gradient], some)
    exact = x[some].double().requires_grad_()
    expected = F.cross_entropy(exact, target[some], reduction="none")
    (expected_gradient,) = torch.autograd.grad(expected, exact, torch.full_like(expected, 0.5))
    torch.testing.assert_close(loss[some].double(), expected, **_tolerance(BF16, expected))
    torch.testing.assert_close(gradient[some].double(), expected_gradient, **_tolerance(BF16, expected_gradient))


@pytest.mark.parametrize(
    ("function", "inputs", "why"),
    [
        (losses, (Given((ROWS, 50257), BF16), Given((ROWS,), I64)), "running values read a row once"),
        (dropped_out, (Given((ROWS, 20480), BF16),), "random numbers need Triton's own language"),
        (rms_norm, (Given((ROWS, 20480), BF16), Given((20480,), BF16)), "one fold"),
        (softmax, (Given((ROWS, 8192), BF16),), "registers hold several such rows"),
        (softmax, (Given((ROWS, 80000), BF16),), "two rows exceed shared memory"),
        (softmax, (Given((100, 20000), BF16),), "few rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_rows_stay_in_registers(
    function: Callable[..., Tensor], inputs: tuple[Given, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not held(Program(function, inputs), monkeypatch), why


def test_a_row_of_minus_infinity_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    ((kernel, source),) = held(Program(softmax, (Given((ROWS, 10007), BF16),)), monkeypatch)
    x = numbers(BF16, 10007)
    x[7], x[1, 5:] = -torch.inf, -torch.inf
    result = _run(kernel, source, [x], x.shape)
    torch.testing.assert_close(result, x[SOME].softmax(-1), equal_nan=True, rtol=0.01, atol=1e-6)
