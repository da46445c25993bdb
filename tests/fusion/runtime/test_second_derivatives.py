"""Second derivatives and forward-mode derivatives around a fused function: as in eager, or an error."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.lowering.errors import FusionError
from tests.fusion.agreement import STRICT

Function = Callable[..., torch.Tensor]


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The saved tensors are not the inputs."""
    return torch.tanh(x @ w).exp()


def given() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of odd length that are not contiguous, and a weight."""
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3).t()
    return x, torch.linspace(-1, 2, 20, dtype=torch.float64).sin().view(5, 4).requires_grad_()


def penalty(f: Function) -> tuple[torch.Tensor, ...]:
    """The weight's gradient of a loss that contains a gradient."""
    x, w = given()
    x.requires_grad_()
    out = f(x, w)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return torch.autograd.grad(out.sum() + (gradient.norm(dim=1) - 1).square().sum(), [w, x])


def of_a_computed_input(f: Function) -> tuple[torch.Tensor, ...]:
    """The first input is computed from another one, which is also passed."""
    x, w = given()
    x.requires_grad_()
    out = f((w.sum() * x).sin(), w) * 2
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), [w, x])


def third(f: Function) -> tuple[torch.Tensor, ...]:
    x, w = given()
    x.requires_grad_()
    (first,) = torch.autograd.grad(f(x, w).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
    return torch.autograd.grad(second.square().sum(), [x, w])


def by_gradients_of_results(f: Function) -> tuple[torch.Tensor, ...]:
    x, w = given()
    out = f(x, w)
    along = torch.ones_like(out).requires_grad_()
    (gradient,) = torch.autograd.grad(out, w, along, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), [along, w])


def of_one_result(f: Function) -> tuple[torch.Tensor, ...]:
    """Of two results one has no gradient, and neither has an input that only this one depends on."""
    x, w = given()
    other = torch.ones(4, dtype=torch.float64, requires_grad=True)
    two = both(f)
    (gradient,) = torch.autograd.grad(two(x, other, w)[0].square().sum(), w, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), w)


def both(f: Function) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def two(x: torch.Tensor, other: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x, w), (other.exp() * w).sum()

    return two if f is layer else fusion.fuse(two, options=STRICT)


def forward_over_reverse(f: Function) -> tuple[torch.Tensor, ...]:
    x, w = given()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
        (gradient,) = torch.autograd.grad(f(dual, w).sum(), dual, create_graph=True)
        return tuple(forward_ad.unpack_dual(gradient))


def number(f: Function) -> Function:
    _, w = given()
    return lambda x: f(x, w).square().sum()


DERIVATIVES: dict[str, Callable[[Function], object]] = {
    "penalty": penalty,
    "computed": of_a_computed_input,
    "third": third,
    "cotangents": by_gradients_of_results,
    "one_result": of_one_result,
    "dual": forward_over_reverse,
    "hessian_forwards": lambda f: functional.hessian(
        number(f), given()[0], vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "jacobian_at_once": lambda f: functional.jacobian(f, given(), vectorize=True),
}
MORE: dict[str, Callable[[Function], object]] = {
    "hessian_at_once": lambda f: functional.hessian(number(f), given()[0], vectorize=True),
    "hvp": lambda f: functional.hvp(number(f), given()[0], given()[0])[1],
    "jvp": lambda f: functional.jvp(f, given(), given())[1],
    "func_jvp_of_grad": lambda f: torch.func.jvp(torch.func.grad(number(f)), (given()[0],), (given()[0],))[1],
}


@pytest.mark.parametrize("name", [*DERIVATIVES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_derivatives_around_a_fused_function(name: str) -> None:
    derive = {**DERIVATIVES, **MORE}[name]
    expected = derive(layer)
    torch.testing.assert_close(derive(fusion.fuse(layer, options=STRICT)), expected)


def test_the_report_says_why_operations_ran_eagerly() -> None:
    fused = fusion.fuse(lambda x, w: layer(x, w) + 1, options=STRICT)
    penalty(fused)
    assert "gradients of gradients" in fusion.report(fused).graphs[-1].failure


def test_modules_and_losses_of_more_than_one_result() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Softplus(), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)

    def step(net: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        y = x.clone().requires_grad_()
        loss = net(y).square().sum()
        (gradient,) = torch.autograd.grad(loss, y, create_graph=True)
        parameters = [p for p in plain.parameters() if p.requires_grad]
        return list(torch.autograd.grad(loss + gradient.square().sum(), parameters, allow_unused=True))

    plain = net
    expected = step(net)
    torch.testing.assert_close(step(fusion.fuse(net, options=STRICT)), expected)


def test_several_results_of_which_not_all_are_differentiable() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmax(-1), x.view(-1), (x.exp() * 2).sum(), x > 0, x.sin()

    def second(f: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> torch.Tensor:
        x = given()[0].contiguous().requires_grad_()
        _, flat, total, _, sine = f(x)
        (gradient,) = torch.autograd.grad((sine * flat.view(3, 5)).sum() * total, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    torch.testing.assert_close(second(fusion.fuse(f, options=STRICT)), second(f))


def test_autocast_is_that_of_the_call() -> None:
    x, w = (t.detach().float().requires_grad_() for t in given())
    fused = fusion.fuse(layer, options=STRICT)

    def second(f: Function) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = f(x, w)
        (gradient,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), w)[0]

    torch.testing.assert_close(second(fused), second(layer), rtol=0.1, atol=0.1)


def test_views_that_cannot_be_recreated_are_an_error() -> None:
    """PyTorch would return zero for the gradient of a gradient with respect to its input."""
    x = torch.randn(3, 4).requires_grad_()
    out = fusion.fuse(lambda x: (lambda y: (y, y.t()))(x.sin()), options=STRICT)(x)[0]
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(FusionError, match="views"):
        torch.autograd.grad(gradient.square().sum() + x.sum(), x)


DRAWING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5) * x.sin(),
    "several": lambda x: (nn.functional.dropout(x.sin(), 0.3) + torch.rand_like(x)) * nn.functional.dropout(x, 0.2),
    "channels": lambda x: nn.functional.dropout1d(x.sin(), 0.5) * x,
    "in_place": lambda x: nn.functional.dropout(x.sin(), 0.5, inplace=True) * x,
    "filled": lambda x: (x * torch.empty_like(x).normal_(1, 2)).sin() * torch.empty_like(x).exponential_(),
    "two_changed": lambda x: nn.functional.rrelu(x.sin(), training=True).square(),
    "of_the_library": lambda x: x.exp() * torch.randperm(4) * torch.randint(0, 9, (4,)),
    "checkpoint": lambda x: checkpoint(lambda y: nn.functional.dropout(y.sin(), 0.5) * y.exp(), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_of_the_call_are_drawn_again(name: str) -> None:
    """Compared with differences of the region's gradients for the same random numbers."""
    f = DRAWING[name]
    fused = fusion.fuse(lambda x: f(x), options=STRICT)
    x = torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    along, weight = torch.cos(9 * x.detach()), torch.sin(7 * x.detach())

    def gradient(step: float, create_graph: bool = False) -> torch.Tensor:
        at = x if create_graph else (x.detach() + step * along).requires_grad_()
        torch.manual_seed(4)
        return torch.autograd.grad(fused(at).square().sum(), at, create_graph=create_graph)[0]

    gradients = gradient(0, create_graph=True)
    before = torch.get_rng_state()
    (second,) = torch.autograd.grad((gradients * weight).sum(), x)
    assert torch.equal(torch.get_rng_state(), before)
    expected = ((gradient(1e-6) - gradient(-1e-6)) * weight).sum() / 2e-6
    torch.testing.assert_close((second * along).sum(), expected, rtol=1e-5, atol=1e-6)
    assert float(second.abs().sum()) > 0
    assert "gradients of gradients" in fusion.report(fused).graphs[-1].failure


def test_random_numbers_of_eager_operations_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the region ran as eager's own operations, which draw otherwise."""

    def fail(*args: object, **kwargs: object) -> object:
        raise RuntimeError("nothing is compiled")

    monkeypatch.setattr("fusion.compilation.graph_compiler.compile_graph", fail)
    x = torch.linspace(-1, 2, 60).view(3, 20).requires_grad_()
    out = fusion.fuse(lambda x: nn.functional.dropout(x, 0.5) * x.sin(), options={"strict": False})(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(FusionError, match=r"(?s)could not be drawn again.*test_second_derivatives.py:\d+"):
        torch.autograd.grad(gradient.square().sum(), x)


def test_a_checkpoint_that_runs_as_it_was_captured_draws_the_same_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Callable[..., object]:
        raise RuntimeError("nothing is captured")

    monkeypatch.setattr("fusion.compilation.region.RegionCompiler._aot", fail)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x.sin(), 0.5) * x.exp()

    fused = fusion.fuse(lambda x: checkpoint(dropped, x, use_reentrant=False) * 2, options={"strict": False})
    x = torch.linspace(1, 2, 60).view(3, 20).requires_grad_()
    out = fused(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient != 0, out != 0)


def test_a_gradient_that_is_missing_is_no_batch() -> None:
    """Eigenvectors are an operand without a gradient: AOTAutograd passes None."""
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.linalg.eig(x))

    def gradient(f: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> torch.Tensor:
        return torch.autograd.grad(f(x)[0].abs().sum(), x)[0]

    torch.testing.assert_close(gradient(fusion.fuse(f, options=STRICT)), gradient(f))


def test_running_statistics_do_not_matter() -> None:
    """They are changed in place, once for each call, and no result depends on them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Softplus(), nn.Linear(7, 1)).double()
    x = torch.randn(4, 5, dtype=torch.float64)

    def step(net: nn.Module, called: nn.Module) -> list[torch.Tensor]:
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(called(y).sum(), y, create_graph=True)
        loss = called(x + 1).sum() + gradient.square().sum()
        return [*torch.autograd.grad(loss, list(net.parameters())), *(b.clone() for b in net.buffers())]

    other = copy.deepcopy(net)
    expected = step(net, net)
    torch.testing.assert_close(step(other, fusion.fuse(other, options=STRICT)), expected)


def test_of_inputs_that_are_changed_in_place() -> None:
    x, scale = torch.randn(3, 4, requires_grad=True), torch.ones(4)

    def f(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = (x * scale.mean()).sin()
        scale.add_(1)
        return out

    (gradient,) = torch.autograd.grad(fusion.fuse(f, options=STRICT)(x, scale).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, x.cos())
    with pytest.raises(FusionError, match="in place"):
        torch.autograd.grad(gradient.sum() + x.sum(), x)
    bias = torch.zeros(4)
    out = fusion.fuse(lambda x, b: (x + b).sum(), options=STRICT)(x, bias)  # saves nothing
    bias.add_(1)
    (gradient,) = torch.autograd.grad(out * out, x, create_graph=True)
    with pytest.raises(FusionError, match="in place since"):
        torch.autograd.grad(gradient.sum(), x)


def test_a_checkpoint_keeps_no_more_than_its_inputs() -> None:
    """Intermediate tensors of a checkpoint are recomputed: a region only references such an input weakly."""
    fused = fusion.fuse(lambda h: h.sum() * 2, options=STRICT)
    seen: list[weakref.ref[torch.Tensor]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 3
        seen.append(weakref.ref(hidden))
        return fused(hidden)

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False)
    assert seen[0]() is None
    with pytest.raises(FusionError, match="gone"):
        torch.autograd.grad(out, x, create_graph=True)
    checkpoint(block, x, use_reentrant=False).backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 6.0))


def test_inputs_that_are_changed_in_place_are_let_go_without_backward() -> None:
    fused = fusion.fuse(lambda h: h.mul_(2).sin(), options=STRICT)
    weight = torch.randn(3, requires_grad=True)
    hidden = weight * 1
    seen = weakref.ref(hidden)
    out = fused(hidden)
    assert out.requires_grad
    del hidden, out
    assert seen() is None


def test_inputs_are_let_go_by_backward() -> None:
    fused = fusion.fuse(lambda h, x: h + x.sum(), options=STRICT)
    x, weight = torch.randn(3), torch.randn(3, requires_grad=True)
    hidden = weight * 2
    seen = [weakref.ref(hidden), weakref.ref(x)]
    out = fused(hidden, x)
    del hidden, x
    out.sum().backward(retain_graph=True)
    assert seen[0]() is not None
    out.sum().backward()
    assert seen[0]() is None and seen[1]() is None and out.grad_fn is not None
    torch.testing.assert_close(weight.grad, torch.full((3,), 4.0))
