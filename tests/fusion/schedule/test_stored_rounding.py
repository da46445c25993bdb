"""Readers of a stored 16-bit tensor see the rounded numbers, also through a copy, a selection or a part of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.schedule.iteration.dependences import Dependences
from tests.fusion.agreement import STRICT, error
from tests.lowering.lowered import lowered

HALVES = (torch.bfloat16, torch.float16)
ROWS = 33


def heavy(x: Tensor, y: Tensor) -> Tensor:
    """An expression too costly to recompute in every reader: a node of its own, of which others read copies."""
    return (x * y).exp().tanh() + y


COPIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a stack of sums": lambda x, y: torch.stack([x + k for k in range(3)]),
    "a stack": lambda x, y: torch.stack([x + 0.3, x * y]),
    "parts of parts": lambda x, y: torch.cat([torch.cat([x.tanh(), x * y]), x + 0.3]),
    "padded": lambda x, y: F.pad(x * 1.7 + y, (0, 0, 1, 2), value=1.0),
    "padded, heavy": lambda x, y: F.pad(heavy(x, y), (0, 0, 1, 2), value=1.0),
    "chosen": lambda x, y: torch.where(x > y, heavy(x, y), x * y),
    "chosen among chosen": lambda x, y: torch.where(x > y, x * 1.7, torch.where(y > 0.5, heavy(x, y), x + y)),
    "masked": lambda x, y: heavy(x, y).masked_fill(x > 0.8, 1.0),
    "rolled": lambda x, y: heavy(x, y).roll(3, 0),
    "backwards": lambda x, y: (x * 1.7 + y - 0.1).flip(0),
    "repeated": lambda x, y: heavy(x, y).repeat(2, 1),
    "in another order": lambda x, y: heavy(x, y).reshape(3, -1, 1).transpose(0, 1).contiguous(),
    "looked up": lambda x, y: heavy(x, y)[torch.arange(20) // 2],
    "a part of parts": lambda x, y: torch.cat([heavy(x, y), x * y])[5:40].clone(),
    "on one side of a diagonal": lambda x, y: heavy(x.t(), y).tril()[..., None],
    "a product": lambda x, y: (x.reshape(3, -1) @ y.reshape(-1, 3)).t().contiguous()[..., None],
    "a sum": lambda x, y: torch.cat([(x.expand(-1, 7) * y).sum(1, keepdim=True), x * y]),
}


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(ROWS, 1, generator=generator) for _ in range(2))
    return x.to(dtype), (y + 0.1).to(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", COPIES)
def test_readers_of_a_result_read_the_stored_numbers(name: str, dtype: torch.dtype) -> None:
    def doubled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        result = COPIES[name](x, y)
        return result, result.float() * 2

    result, twice = fusion.fuse(doubled, options=STRICT)(*given(dtype))
    assert torch.equal(twice, result.float() * 2)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", COPIES)
def test_a_row_that_backward_reads_has_the_mean_that_forward_has_kept(name: str, dtype: torch.dtype) -> None:
    """The norm of a row of one number has no gradient; the number less another's mean would be scaled by 1 / √ε."""

    def normed(x: Tensor, y: Tensor) -> Tensor:
        rows = COPIES[name](x, y)
        return F.layer_norm(rows, rows.shape[-1:])

    def gradients(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        result = f(*leaves)
        generator = torch.Generator().manual_seed(1)
        result.backward(torch.randn(result.shape, generator=generator).to(result.dtype))
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    inputs = given(dtype)
    exact = gradients(normed, *(x.double() for x in inputs))
    ours, eager = gradients(fusion.fuse(normed, options=STRICT), *inputs), gradients(normed, *inputs)
    for got, expected, truth in zip(ours, eager, exact, strict=True):
        assert error(got, truth) <= 2 * error(expected, truth) + 1e-6


def test_a_copy_that_only_the_program_sees_is_not_rounded() -> None:
    """A selection among 16-bit floats within a kernel, stored nowhere, keeps float32 numbers."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (torch.cat([heavy(x, y), x * y]).float() * 3).to(torch.float64)

    def wide(x: Tensor, y: Tensor) -> Tensor:
        return f(x.float(), y.float())

    inputs = given(torch.bfloat16)
    assert torch.equal(fusion.fuse(f, options=STRICT)(*inputs), fusion.fuse(wide, options=STRICT)(*inputs))


def test_stored_nodes_and_their_copied_operands_are_rounded() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        part, other = heavy(x, y), (x - y).exp().tanh()
        whole = torch.cat([part, x.tanh() * y]).flip(0)
        return whole.clone(), other.float().sum(0), whole.float().sum(0)

    program = lowered(f, *given(torch.bfloat16))
    dependences = Dependences(program)
    rounded = {dependences.outs[k] for k in dependences.rounded(range(len(program.nodes)))}
    assert {"add", "mul_1", "cat"} <= rounded  # parts of stored tensors
    assert not {"exp", "tanh", "exp_1", "tanh_1", "tanh_2"} & rounded
    assert dependences.rounded_anyway == dependences.rounded(dependences.generated)


def test_values_recomputed_at_few_points_equal_the_stored_ones() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = heavy(x, y).flip(0)
        return rows, rows[:1].float() * 2

    result, twice = fusion.fuse(f, options=STRICT)(*(torch.rand(4096, 1).bfloat16() for _ in range(2)))
    assert torch.equal(twice, result[:1].float() * 2)
