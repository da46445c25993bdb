"""Scans against eager: values, dtypes, ties, NaN, empty and single elements, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Scan
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_program
from tests.lowering.lowered import calls, check, lowered, traced

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

SCANS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "cummax": lambda x, d: tuple(x.cummax(d)),
    "cummin": lambda x, d: tuple(x.cummin(d)),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_floats(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 7, 5).to(dtype)
    for dim in (0, 1, -1):
        program = check(lambda x, dim=dim: SCANS[name](x, dim), x)
        assert any(isinstance(node, Scan) for node in program.nodes)
    check(lambda x: SCANS[name](x, 1), x.transpose(0, 2))
    check(lambda x: SCANS[name](x[:, 1::2, 1:], -2), x)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin"])
def test_integers(name: str, dtype: torch.dtype) -> None:
    x = torch.randint(-3, 9, (4, 17)).to(dtype)
    check(lambda x: SCANS[name](x, 1), x)


@pytest.mark.parametrize("out", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.float32, torch.bfloat16])
def test_a_dtype_that_is_asked_for(out: torch.dtype) -> None:
    """Numbers that do not fit the dtype wrap around, as in eager."""
    x = torch.randint(-90, 90, (4, 33))
    check(lambda x: (x.cumsum(1, dtype=out), (x % 5).cumprod(0, dtype=out)), x)
    check(lambda x: (x.cumsum(1, dtype=out),), torch.rand(4, 33) * 3)


def test_nothing_is_scanned_as_bool() -> None:
    x = torch.zeros(3, dtype=torch.bool)
    program = lower(traced(lambda x: x.cumsum(0, dtype=torch.int64), [x]))
    verify_program(program)
    assert not calls(program)
    graph = traced(lambda x: x.cumsum(0, dtype=torch.int64), [x])
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.kwargs = {"dtype": torch.bool}
            node.meta["val"] = node.meta["val"].to(torch.bool)
    assert calls(lower(graph)) == {"cumsum.default": "running sum as bool"}


SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, 1.0, -1.0]


@pytest.mark.parametrize("name", SCANS)
def test_special_values(name: str) -> None:
    """NaN wins for good, the last of equals is the position, -0.0 after 0.0 is kept; infinities add up."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(0, len(SPECIAL), (200, 9), generator=generator)
    x = torch.tensor(SPECIAL)[picks]
    program = check(lambda x: SCANS[name](x, 1), x)
    if name in ("cummax", "cummin"):
        result, eager = run_program(program, [x])[0], SCANS[name](x, 1)[0]
        assert torch.equal(torch.signbit(result.nan_to_num(1)), torch.signbit(eager.nan_to_num(1)))


@pytest.mark.parametrize("name", SCANS)
def test_little_or_nothing_to_scan(name: str) -> None:
    for shape, dim in (((), 0), ((), -1), ((3, 1), 1), ((0, 3), 0), ((0, 3), 1), ((3, 0), -1)):
        program = check(lambda x, dim=dim: SCANS[name](x, dim), torch.randn(shape))
        assert not any(isinstance(node, Scan) for node in program.nodes)


def test_only_used_results_are_scanned() -> None:
    program = lowered(lambda x: x.cummax(0)[1], torch.randn(5, 3))
    assert [node.op for node in program.nodes if isinstance(node, Scan)] == ["argmax"]


@pytest.mark.parametrize("name", ["cumsum", "logcumsumexp"])
def test_gradients(name: str) -> None:
    """Backward consists of scans of flipped tensors."""

    def backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(SCANS[name](x, 1), x, grad)[0]

    x, grad = torch.randn(3, 17), torch.randn(3, 17)
    program = lowered(backward, x, grad)
    assert not calls(program)
    torch.testing.assert_close(run_program(program, [x, grad])[0], backward(x, grad), rtol=1e-5, atol=1e-5)


def test_operations_that_pytorch_decomposes_into_scans() -> None:
    x = torch.randn(4, 9)
    check(lambda x: torch.cumulative_trapezoid(x), x)
    check(lambda x: torch.cumulative_trapezoid(x, dx=0.5, dim=0), x)
    check(lambda x: torch.masked.cumsum(x, 1, mask=x > 0), x)
    check(lambda x: torch.masked.cumprod(x, 0, mask=x > 0), x)


def test_a_symbolic_length() -> None:
    check(lambda x: x.cumsum(1) + x.cummax(0)[0], torch.randn(5, 7), mode="symbolic")
