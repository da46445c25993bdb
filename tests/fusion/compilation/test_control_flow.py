"""Bodies of branches, loops and scans are compiled as graphs of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.calls.fallback import as_it_is
from fusion.compilation.control_flow import compile_bodies
from fusion.runtime import Boxed
from tests.fusion.agreement import STRICT, agree


def branched(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two results that are equal, and are not to share memory."""
    return torch.cond(x.sum() > 0, lambda t: ((t @ w).sin(), (t @ w).sin()), lambda t: (t.cos(), t.tanh()), (x * 2,))


def branched_twice(x: Tensor, w: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return torch.cond(t[0, 0] > 1, lambda u: (u * 2).sin(), lambda u: (u - 1).exp(), (t,))

    return torch.cond(x.sum() > 0, inner, lambda t: t.cos() * w, (x + 1,)) * 2


def of_constants(x: Tensor, w: Tensor) -> Tensor:
    ramp = torch.arange(5.0, dtype=x.dtype)
    return (
        torch.cond(x.sum() > 0, lambda t: t * ramp.sin(), lambda t: t / 3 + torch.tensor([1.0, 2, 3, 4, 5]), (x,)) @ w
    )


def recurrent(x: Tensor, w: Tensor) -> Tensor:
    """Backward's body takes a gradient whose elements share memory, and is not compiled."""
    last, rows = scan(lambda h, row: (torch.tanh(h @ w + row), (h * w[0]).sum()), x[0] * 0, x)
    return last.sum() + rows * 2


def softmaxes(x: Tensor, w: Tensor) -> Tensor:
    turned = x.t().contiguous().t()
    return scan(lambda h, row: (torch.softmax(h + row, -1), (h @ w).sin()), x[0] * 0, turned)[1] + 1


PROGRAMS = (branched, branched_twice, of_constants, recurrent, softmaxes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_bodies_and_their_gradients(program: Callable[..., object], dynamic: bool) -> None:
    w = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    for sign in (1, -1):
        x = torch.rand(5, 5, dtype=torch.float64).mul(sign).requires_grad_()
        result = agree(program, x, w, backward=True, dynamic=dynamic)
        if not dynamic:  # symbolic strides leave a body as it is; a report includes earlier compilations
            assert "forward_body" in str(result)
            assert ("backward_body" in str(result)) == (program is not recurrent)


@pytest.mark.parametrize("dynamic", [False, True])
def test_loops(dynamic: bool) -> None:
    def doubled(x: Tensor) -> Tensor:
        start = (torch.tensor(0), x[:, :3].t().sin())
        return while_loop(lambda n, t: n < 4, lambda n, t: (n + 1, (t.t() @ t).t().sin() + t), start)[1] + 1

    result = agree(doubled, torch.randn(3, 5, dtype=torch.float64), dynamic=dynamic)
    assert {"lt", "add_mm_sin_add"} <= {kernel.name for kernel in result.kernels}


def test_a_body_that_draws_numbers_stays() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: torch.nn.functional.dropout(t, 0.5) * 2, lambda t: t.cos(), (x.exp(),))

    fused = fusion.fuse(f, options=STRICT)
    result = fused(torch.ones(1000))
    assert set(result.unique().tolist()) == {0.0, torch.tensor(4.0).mul(torch.tensor(1.0).exp()).item()}
    assert str(fusion.report(fused)).count("_body: ") == 1


def captured(x: Tensor) -> fx.GraphModule:
    branches: tuple[Callable[[Tensor], Tensor], ...] = (lambda t: t * 2, lambda t: t + 1)
    return make_fx(lambda x: torch.cond(x.sum() > 0, *branches, (x,)), tracing_mode="fake")(x)


def test_a_body_finds_tensors_as_it_was_traced_with_them() -> None:
    graph = captured(torch.ones(2, 3))
    seen: list[tuple[int, ...]] = []

    def compile_one(body: fx.GraphModule) -> Boxed:
        def run(args: list[object]) -> tuple[object, ...]:
            seen.extend(arg.stride() for arg in args if isinstance(arg, Tensor))
            return as_it_is(body)(args)

        return run

    compile_bodies(graph, compile_one)
    x = torch.rand(3, 2).t()
    torch.testing.assert_close(graph(x), x * 2)
    assert seen == [(3, 1)]


def test_a_body_of_a_tensor_whose_elements_are_one_stays() -> None:
    graph = captured(torch.ones(1, 3).expand(2, 3))
    compile_bodies(graph, lambda body: pytest.fail("it could be given a tensor of other elements"))
    x = torch.rand(2, 3)
    torch.testing.assert_close(graph(x), x * 2)
