"""Numbers of the host among tensors of a device: constants where they are known, else passed by value.

The device is `meta` here; numbers are compared on a GPU, in `tests/gpu/test_host_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.ir.expr import Const, postorder
from fusion.lowering.ir.program import Extern, Program, reads
from fusion.lowering.lower import lower


def lowered(f: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Program:
    functional = torch.func.functionalize(f)
    return lower(make_fx(functional, decompositions(), "fake")(*inputs), device=torch.device("meta"))


def constants(program: Program) -> set[float]:
    exprs = [expr for node in program.nodes if not isinstance(node, Extern) for expr in node.exprs]
    return {part.value for part in postorder(*exprs) if isinstance(part, Const)}


def given(program: Program) -> set[str]:
    """Return the inputs that its generated nodes read, if it calls nothing."""
    assert not any(isinstance(node, Extern) for node in program.nodes)
    return {name for node in program.nodes for name in reads(node)} - {node.out for node in program.nodes}


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: torch.where(x > 0.5, x, torch.tensor(-1e4)), -1e4),
        (lambda x: x.masked_fill(x > 0.5, torch.tensor(float("-inf"))), float("-inf")),
        (lambda x: x / torch.sqrt(torch.tensor(64.0, dtype=torch.float64)), 8.0),
        (lambda x: x * torch.full([], 3), 3.0),
        (torch.vmap(torch.vmap(lambda x: torch.tanh(x / 30))), 30.0),
        (lambda x: x - torch.tensor([1.0, 2.0, 3.0]).sum(), None),
    ],
    ids=["where", "masked_fill", "root", "full", "vmap", "of more than numbers"],
)
def test_known_numbers_are_constants(f: Callable[..., torch.Tensor], expected: float | None) -> None:
    program = lowered(f, torch.empty(4, 5, device="meta"))
    calls = [node for node in program.nodes if isinstance(node, Extern)]
    if expected is None:
        assert [call.name for call in calls][-1] == "aten.sum.default"
    else:
        assert not calls and expected in constants(program)


def test_host_scalars_that_are_not_constant_are_read_directly() -> None:
    def f(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.where(x > s, x * s, s) + 1

    program = lowered(f, torch.empty(4, 5, device="meta"), torch.tensor(2.0))
    assert given(program) == {"x_1", "s_1"}


def test_floats_of_numbers_are_computed_where_they_are_read() -> None:
    def f(x: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * (s.double() / t).float() - s

    program = lowered(f, torch.empty(4, 5, device="meta"), torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64))
    assert given(program) == {"x_1", "s_1", "t_1"}


def test_results_on_the_host_are_computed_there() -> None:
    def f(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * (s + 1), s + 1

    program = lowered(f, torch.empty(4, 5, device="meta"), torch.tensor(2.0))
    assert [node.name for node in program.nodes if isinstance(node, Extern)] == ["aten.add.Tensor"]
    assert [program.buffers[name].device.type for name in program.output_names()].count("cpu") == 1


def test_integers_divide_on_the_host() -> None:
    """Eager refuses to divide by zero there."""
    program = lowered(lambda x, s: x * (7 // s), torch.empty(4, device="meta"), torch.tensor(2))
    assert [node.name for node in program.nodes if isinstance(node, Extern)] != []


def test_random_numbers_and_rows_of_the_host_stay_calls() -> None:
    program = lowered(lambda x: x * torch.rand(()), torch.empty(4, device="meta"))
    assert [node.name for node in program.nodes if isinstance(node, Extern)] == ["aten.rand.default"]
