"""Inputs have gradients if results depend on them, as in eager, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import fusion
from tests.fusion.agreement import STRICT

Program = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


def independent(x: Tensor, y: Tensor, z: Tensor) -> Sequence[Tensor]:
    return x.sin() * 2, (y * y).sum(), z.exp()


def one_in_two(x: Tensor, y: Tensor, z: Tensor) -> Sequence[Tensor]:
    return x * y, y.cos(), x.detach() * z


def views_of_one(x: Tensor, y: Tensor, z: Tensor) -> Sequence[Tensor]:
    """Autograd sees the base of the views."""
    result = x * z
    return result.view(2, 3), y * 3, result.t()


def changed(x: Tensor, y: Tensor, z: Tensor) -> Sequence[Tensor]:
    """An input that is changed in place is a result, too."""
    own = z * 1.5
    own.mul_(x)
    return own, y + 1, x - 1


def given_back(x: Tensor, y: Tensor, z: Tensor) -> Sequence[Tensor]:
    return x, y * z, y.t()


def with_detached(x: Tensor, y: Tensor, z: Tensor) -> Sequence[Tensor]:
    """The same numbers as a result, once with a gradient and once without."""
    result = x * 1
    return result.t(), result.detach(), y * z


def with_positions(x: Tensor, y: Tensor, z: Tensor) -> Sequence[Tensor]:
    """A result without gradient precedes others."""
    return (x * 2).argmax(), y.tanh(), z.square() + x.detach()


PROGRAMS = [independent, one_in_two, views_of_one, changed, given_back, with_detached, with_positions]


def given() -> list[Tensor]:
    numbers = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 2, 3)
    return [part.clone().requires_grad_() for part in numbers]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_inputs_that_lead_nowhere_have_no_gradient(program: Program, which: int) -> None:
    def gradients(function: Program) -> Sequence[Tensor | None]:
        leaves = given()
        end = function(*leaves)[which]
        return torch.autograd.grad(end.sum(), leaves, allow_unused=True) if end.requires_grad else ()

    torch.testing.assert_close(gradients(fusion.fuse(program, options=STRICT)), gradients(program))


def test_all_results_together_have_all_gradients() -> None:
    def gradients(function: Program) -> Sequence[Tensor | None]:
        leaves = given()
        ends = [end for end in function(*leaves) if end.requires_grad]
        return torch.autograd.grad([ends[0].sum(), ends[-1].sum()], leaves, allow_unused=True)

    for program in PROGRAMS:
        torch.testing.assert_close(gradients(fusion.fuse(program, options=STRICT)), gradients(program))


def test_inputs_changed_in_place_that_lead_nowhere() -> None:
    def program(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x.mul_(y)
        return z.exp()

    def gradients(function: Callable[..., Tensor], *, of_result: bool) -> Sequence[Tensor | None]:
        leaves = given()
        x = leaves[0] * 1
        result = function(x, *leaves[1:])
        return torch.autograd.grad((result if of_result else x).sum(), leaves, allow_unused=True)

    fused = fusion.fuse(program, options=STRICT)
    for of_result in (True, False):
        torch.testing.assert_close(gradients(fused, of_result=of_result), gradients(program, of_result=of_result))


def test_gradients_of_gradients_of_some_of_the_inputs() -> None:
    def gradients(function: Program) -> Sequence[Tensor | None]:
        leaves = given()
        first, _, _ = function(*leaves)
        actual = torch.autograd.grad(first.square().sum(), leaves, create_graph=True, allow_unused=True)
        there = [grad.square().sum() for grad in actual if grad is not None]
        return *actual, *torch.autograd.grad(there, leaves, allow_unused=True)

    with pytest.warns(fusion.FusionWarning, match="gradients of gradients"):
        result = gradients(fusion.fuse(one_in_two, options=STRICT))
    torch.testing.assert_close(result, gradients(one_in_two))


class TwoHeads(nn.Module):
    """Only one of whose heads is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.other = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.trunk(x).relu()
        return self.head(inner), self.other(inner)


def test_weights_of_a_head_that_is_not_trained_do_not_decay() -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    before = [weight.detach().clone() for weight in model.other.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    fused = fusion.fuse(model, options=STRICT)
    for _ in range(2):
        optimizer.zero_grad()
        fused(torch.randn(7, 5))[0].square().sum().backward()
        optimizer.step()
    assert all(weight.grad is None for weight in model.other.parameters())
    assert all(weight.grad is not None for weight in (*model.trunk.parameters(), *model.head.parameters()))
    torch.testing.assert_close(list(model.other.parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_results_whose_elements_share_memory(size: int, step: int) -> None:
    """Each element of the gradient counts, even if the result's memory holds fewer numbers."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * x).unfold(1, size, step), x.sin().t()

    def gradient(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        x = torch.linspace(-1, 1, 27).view(3, 9).requires_grad_()
        results = function(x)
        torch.autograd.backward(results, [torch.arange(float(each.numel())).view(each.shape) for each in results])
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(fusion.fuse(program, options=STRICT)), gradient(program))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_saved_input_with_gaps_that_is_changed_in_place(stepped: bool) -> None:
    """Its copy, which backward gets, has no gaps between its elements."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        result = (x * y.long()[:, 0]).sum()
        y.t()[..., 0].zero_()
        return result

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    values = torch.randint(1, 9, (8, 8), dtype=torch.int32)
    step = 2 if stepped else 1
    y, z = (values.clone()[: 4 * step : step, : 4 * step : step] for _ in range(2))
    expected = torch.autograd.grad(loss(x, y), x)
    fused = fusion.fuse(loss)
    torch.testing.assert_close(torch.autograd.grad(fused(x, z), x), expected)
    torch.testing.assert_close(z, y)
    assert fusion.report(fused).kernels
