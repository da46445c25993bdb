"""Differences of 1 and a power keep their precision; others are unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import fusion
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.expr import Op, postorder
from fusion.lowering.ir.program import Map, Program
from fusion.lowering.verify import verify_program
from fusion.schedule.rewrites.power_differences import subtract_exactly
from tests.lowering.lowered import lowered

STEPS = torch.tensor([1.0, 2.0, 7.0, 1e3, 1e6, 0.0, -3.0, float("inf"), -float("inf"), float("nan")])
EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "from one": lambda t: 1 - 0.999**t,
    "one from it": lambda t: 0.999**t - 1,
    "in a list": lambda t: torch._foreach_sub(torch._foreach_pow(0.999, [t]), 1)[0],
    "grown": lambda t: (1.001**t).unsqueeze(0) - 1,
    "of an exact base": lambda t: 1 - 0.9375**t,
    "of a large base": lambda t: 10 ** (t / 256).clamp(-30, 30) - 1,
    "among others": lambda t: (1 - 0.9**t) / (1 - 0.999 ** t[:, None]).sqrt(),
}
LARGE = {"of an exact base", "of a large base"}
"""Of these, large powers stay."""

OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of two": lambda t: 2 - 0.999**t,
    "of the base one": lambda t: 1 - 1**t,
    "of nothing": lambda t: 1 - 0**t,
    "of a negative base": lambda t: 1 - (-0.5) ** t,
    "of a power of a tensor": lambda t: 1 - t**0.3,
    "of integers": lambda t: 1 - 3 ** t.nan_to_num(2, 2, 2).clamp(0, 7).long(),
}


def names(program: Program) -> set[str]:
    maps = [node.expr for node in program.nodes if isinstance(node, Map)]
    return {part.name for part in postorder(*maps) if isinstance(part, Op)}


@pytest.mark.parametrize("name", EXACT)
def test_exact_differences_keep_their_precision(name: str) -> None:
    given = lowered(EXACT[name], STEPS)
    program = subtract_exactly(given)
    verify_program(program)
    assert "expm1" in names(program) and ("pow" in names(program)) == (name in LARGE)
    (result,), wide = run_program(program, [STEPS]), EXACT[name](STEPS.double())
    torch.testing.assert_close(result.double(), wide, rtol=5e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("target", ["c", "reference"])
def test_equal_numbers_differ_by_a_positive_zero(name: str, target: str) -> None:
    """The reciprocal shows the sign of the zero."""
    zeros = torch.tensor([0.0, -0.0])
    fused = fusion.fuse(lambda t: 1 / EXACT[name](t), options={"target": target, "strict": True})
    torch.testing.assert_close(fused(zeros), 1 / EXACT[name](zeros), equal_nan=True)


@pytest.mark.parametrize("base", [4, 10, 256, 0.5, 1.01, 0.9])
def test_large_powers_are_as_near_as_eager_s(base: float) -> None:
    t = torch.linspace(1, 60, 2001) / math.log(base)
    exact = base ** t.double() - 1
    program = subtract_exactly(lowered(lambda t: base**t - 1, t))
    (ours,), eagers = run_program(program, [t]), base**t - 1
    off, own = (((result - exact) / exact).abs().mean() for result in (ours, eagers))
    assert off <= 1.1 * own


@pytest.mark.parametrize("name", OTHERS)
def test_other_differences_are_unchanged(name: str) -> None:
    program = lowered(OTHERS[name], STEPS)
    assert subtract_exactly(program) is program


def test_a_power_that_is_read_elsewhere_stays() -> None:
    program = subtract_exactly(lowered(lambda t: ((power := 0.999**t), 1 - power), STEPS))
    verify_program(program)
    assert {"expm1", "pow"} <= names(program)
    power, rest = run_program(program, [STEPS])
    torch.testing.assert_close(power, 0.999**STEPS, equal_nan=True)
    torch.testing.assert_close(rest.double(), 1 - 0.999 ** STEPS.double(), rtol=5e-7, atol=0, equal_nan=True)


def test_strict_numerics_round_as_eager_does() -> None:
    fused = fusion.fuse(EXACT["from one"], options={"numerics": "strict", "strict": True})
    torch.testing.assert_close(fused(STEPS[:2]), EXACT["from one"](STEPS[:2]), rtol=1e-6, atol=0)
