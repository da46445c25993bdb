"""Composition with PyTorch: nested fused functions, threads, custom functions and operations, function transforms,
exported programs, tensor subclasses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.compiler import nested_compile_region

import fusion
from tests.fusion.agreement import STRICT, agree


def test_a_fused_function_calls_another() -> None:
    inner = fusion.fuse(lambda x: torch.softmax(x, -1) * 2, options=STRICT)
    outer = fusion.fuse(lambda x: inner(x).sum(0) + inner(x + 1).amax(0), options=STRICT)
    x = torch.randn(5, 7)
    expected = (torch.softmax(x, -1) * 2).sum(0) + (torch.softmax(x + 1, -1) * 2).amax(0)
    torch.testing.assert_close(outer(x), expected)
    torch.testing.assert_close(inner(x), torch.softmax(x, -1) * 2)


def test_recursion() -> None:
    @fusion.fuse
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.ones_like(x) if n == 0 else x * power(x, n - 1)

    x = torch.randn(5)
    for n in (0, 1, 4):
        torch.testing.assert_close(power(x, n), x**n)


def test_a_fused_function_inside_one_that_is_not_compiled() -> None:
    inner = fusion.fuse(lambda x: x.exp() + 1, options=STRICT)

    @torch.compiler.disable
    def between(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    x = torch.randn(4)
    torch.testing.assert_close(fusion.fuse(lambda x: between(x + 1).sin())(x), ((x + 1).exp() + 1).mul(2).sin())


def test_fusing_twice_is_fusing_once() -> None:
    f = fusion.fuse(fusion.fuse(lambda x: x.exp() + 1, options=STRICT), options=STRICT)
    x = torch.randn(4)
    torch.testing.assert_close(f(x), x.exp() + 1)
    net = fusion.fuse(fusion.fuse(nn.Linear(4, 3), options=STRICT), options=STRICT)
    torch.testing.assert_close(net(x), nn.functional.linear(x, net.weight, net.bias))


# Threads ------------------------------------------------------------------------------------------------------------


def in_threads(work: list[Callable[[], object]]) -> list[object]:
    """The results of pieces of work that start together."""
    start = threading.Barrier(len(work))

    def run(task: Callable[[], object]) -> object:
        start.wait()
        return task()

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, work))


def test_threads_that_compile_one_function_at_once() -> None:
    fused = fusion.fuse(lambda x: torch.softmax(x, -1) * 2 + x.sum(0), options=STRICT)
    inputs = [torch.randn(4 + k % 3, 7) for k in range(6)]
    results = in_threads([lambda x=x: fused(x) for x in inputs])
    for x, got in zip(inputs, results, strict=True):
        torch.testing.assert_close(got, torch.softmax(x, -1) * 2 + x.sum(0))


def test_threads_that_compile_several_functions_at_once() -> None:
    functions = [lambda x, k=k: torch.tanh(x * (k + 1)).sum(k % 2) for k in range(4)]
    fused = [fusion.fuse(f, options=STRICT) for f in functions]
    x = torch.randn(5, 6)
    for f, got in zip(functions, in_threads([lambda g=g: g(x) for g in fused]), strict=True):
        torch.testing.assert_close(got, f(x))


def test_a_thread_calls_a_fused_function_while_another_traces() -> None:
    """During tracing, the fake function of a custom operation runs: the other thread calls there."""
    other = fusion.fuse(lambda x: x.exp() + 1, options=STRICT)
    x = torch.randn(4)
    expected = other(x)
    seen: list[torch.Tensor] = []

    @torch.library.custom_op("fusion_tests::copied", mutates_args=())
    def copied(y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @copied.register_fake
    def _(y: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(other, x).result(timeout=60))
        return torch.empty_like(y)

    torch.testing.assert_close(fusion.fuse(lambda y: copied(y) * 2, options=STRICT)(x), x * 2)
    assert len(seen) > 1 and all(torch.equal(got, expected) for got in seen)


def test_threads_that_train_one_model_each() -> None:
    def train(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 5, generator=generator)
        weight = torch.ones(5, requires_grad=True)
        fused(x, weight).backward()
        assert weight.grad is not None
        return weight.grad - x.sin().sum(0)

    fused = fusion.fuse(lambda x, w: (x.sin() * w).sum(), options=STRICT)
    for difference in in_threads([lambda k=k: train(k) for k in range(4)]):
        torch.testing.assert_close(difference, torch.zeros(5), rtol=0, atol=1e-5)


def test_a_module_in_threads() -> None:
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).eval()
    fused = fusion.fuse(net, options=STRICT)
    inputs = [torch.randn(3, 5) for _ in range(4)]
    for x, got in zip(inputs, in_threads([lambda x=x: fused(x) for x in inputs]), strict=True):
        torch.testing.assert_close(got, net(x))


# Functions and operations of the user's own -------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """Twice the sine, with a gradient that is not its derivative."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin() * factor

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.factor * 100, None


def test_autograd_functions() -> None:
    agree(lambda x: Scaled.apply(x * 2, 3.0) + 1, torch.randn(4, requires_grad=True), backward=True)


def test_custom_operations() -> None:
    @torch.library.custom_op("fusion_tests::halved_sum", mutates_args=())
    def halved_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy((x.detach().numpy() + y.detach().numpy()) / 2)

    @halved_sum.register_fake
    def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    halved_sum.register_autograd(lambda ctx, grad: (grad / 2, grad / 2))

    @torch.library.custom_op("fusion_tests::doubled_", mutates_args=("x",))
    def doubled_(x: torch.Tensor) -> None:
        x.numpy()[...] *= 2

    def f(x: torch.Tensor) -> torch.Tensor:
        return halved_sum(x * 2, x.exp()).sin() + 1

    def g(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        doubled_(y)
        return y.exp()

    result = agree(f, torch.randn(4, requires_grad=True), backward=True)
    assert any("halved_sum" in extern.name for extern in result.externs)
    agree(g, torch.randn(4))

    def h(x: torch.Tensor) -> torch.Tensor:
        doubled_(x)
        return x + 1

    agree(h, torch.randn(4))
    agree(h, torch.randn(4, 4)[:, 1])


# torch.func ---------------------------------------------------------------------------------------------------------


def energy(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.exp()).sum()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.func.grad(energy)(x),
        lambda x: torch.func.vmap(lambda row: row.softmax(0) * row.sum())(x),
        lambda x: torch.func.vmap(torch.func.grad(energy))(x),
        lambda x: torch.func.jacrev(lambda v: v.sin() * v.sum())(x[0]),
        lambda x: torch.func.jacfwd(lambda v: v.sin() * v.sum())(x[0]),
        lambda x: torch.func.hessian(energy)(x[0]),
        lambda x: torch.func.vjp(torch.tanh, x)[1](torch.ones_like(x))[0],
        lambda x: torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),)),
        lambda x: torch.func.vmap(lambda a, b: a @ b, in_dims=(0, None))(x, x.t()),
        lambda x: torch.func.vmap(lambda row: 30 * torch.tanh(row / 2.5) + True)(x),
    ],
    ids=["grad", "vmap", "vmap_grad", "jacrev", "jacfwd", "hessian", "vjp", "jvp", "vmap_matmul", "vmap_numbers"],
)
def test_transforms_inside(f: Callable[..., object]) -> None:
    agree(f, torch.randn(4, 5), strides=False)


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, lambda f: torch.func.vmap(f), lambda f: torch.func.jacrev(f), lambda f: torch.func.hessian(f)],
    ids=["grad", "vmap", "jacrev", "hessian"],
)
def test_transforms_around(transform: Callable[..., Callable[..., torch.Tensor]]) -> None:
    x = torch.randn(4, 5)
    fused = fusion.fuse(energy)
    torch.testing.assert_close(transform(fused)(x), transform(energy)(x))


def test_modules_called_with_other_weights() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    weights = {name: torch.randn_like(value) for name, value in net.named_parameters()}

    def f(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, weights, (x,))

    agree(f, weights, torch.randn(3, 5))
    fused = fusion.fuse(net)
    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.functional_call(fused, weights, (x,)), f(weights, x))


# Control flow -------------------------------------------------------------------------------------------------------


def branched(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos() + 1, (x * 2,)).exp() + 1


def branched_twice(x: torch.Tensor) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        return torch.cond(t[0, 0] > 1, lambda u: u * 2, lambda u: u - 1, (t,))

    return torch.cond(x.sum() > 0, inner, lambda t: t.cos(), (x + 1,)) * 2


def looped(x: torch.Tensor) -> torch.Tensor:
    def again(count: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return count < 3

    def body(count: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return count + 1, t * 2

    return while_loop(again, body, (torch.tensor(0), x.sin()))[1] + 1


def scanned(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda carry, row: (carry + row, carry * 2), x[0] * 0, x.exp())[1] + 1


@pytest.mark.parametrize("f", [branched, branched_twice, looped, scanned])
@pytest.mark.parametrize("dynamic", [False, True])
def test_control_flow_is_called_between_kernels(f: Callable[[torch.Tensor], torch.Tensor], dynamic: bool) -> None:
    x = torch.randn(3, 5).abs()
    result = agree(f, x, dynamic=dynamic)
    assert any(extern.name in ("cond", "while_loop", "scan") for extern in result.externs)
    agree(f, -x, dynamic=dynamic)


def test_control_flow_in_dumps(tmp_path: Path) -> None:
    fusion.fuse(branched, options={**STRICT, "dump": str(tmp_path)})(torch.ones(3, 5))
    _, *bodies, folder = sorted(tmp_path.iterdir())
    assert len(bodies) == 2 and all(body.name.endswith("_inference_body") for body in bodies)
    assert "a graph" in (folder / "01_program.txt").read_text()
    assert "called_0" in (folder / "90_module.py").read_text()


def test_gradients_of_branches() -> None:
    for sign in (1, -1):
        agree(branched, (sign * torch.rand(3, 5)).requires_grad_(), backward=True)


def test_gradients_of_repeated_regions_of_any_size() -> None:
    """Forward's calls of the region also return sizes, which backward needs."""
    weight = torch.randn(5, 5, requires_grad=True)
    region = nested_compile_region(lambda x: torch.tanh(x @ weight))
    fused = torch.compile(lambda x: region(region(x.sin())) + 1, backend="fusion", dynamic=True, options=STRICT)
    for rows in (4, 7):
        x = torch.randn(rows, 5, requires_grad=True)
        plain = torch.tanh(torch.tanh(x.sin() @ weight) @ weight) + 1
        expected = torch.autograd.grad(plain.square().sum(), (x, weight))
        result = fused(x)
        torch.testing.assert_close(result, plain)
        torch.testing.assert_close(torch.autograd.grad(result.square().sum(), (x, weight)), expected)


def test_scores_written_for_attention_are_called() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def f(q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q * 2, q, q, lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))).exp() + 1

    agree(f, torch.randn(1, 2, 16, 16))


# Programs and tensors of other kinds --------------------------------------------------------------------------------


def test_exported_programs() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.LayerNorm(4)).eval()
    x = torch.randn(3, 5)
    program = torch.export.export(net, (x,))
    fused = fusion.fuse(program.module(), options=STRICT)
    torch.testing.assert_close(fused(x), net(x))
    assert fusion.report(fused).kernels
    torch.testing.assert_close(fusion.fuse(torch.fx.symbolic_trace(net), options=STRICT)(x), net(x))
    torch.testing.assert_close(fusion.fuse(program, options=STRICT)(x), net(x))


class Logged(torch.Tensor):
    """A subclass that only carries its type along."""


def test_subclasses_keep_their_type() -> None:
    x = torch.randn(4).as_subclass(Logged)
    got = fusion.fuse(lambda x: x.exp() + 1)(x)
    assert type(got) is Logged
    torch.testing.assert_close(got.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor).exp() + 1)


def test_tensors_of_two_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.randn(3, 4), torch.randn(3, 4)
    fused = fusion.fuse(lambda x: torch.softmax(x, -1) * 2, options=STRICT)
    got = fused(TwoTensor(a, b))
    assert isinstance(got, TwoTensor)
    torch.testing.assert_close((got.a, got.b), (torch.softmax(a, -1) * 2, torch.softmax(b, -1) * 2))


def test_nested_and_sparse_tensors_run() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    got = fusion.fuse(lambda x: x.sin() * 2)(nested)
    torch.testing.assert_close(got.values(), nested.values().sin() * 2)
    sparse = torch.eye(4).to_sparse()
    got = fusion.fuse(lambda s, x: torch.sparse.mm(s, x) + 1)(sparse, torch.ones(4, 2))
    torch.testing.assert_close(got, torch.full((4, 2), 2.0))


def test_complex_numbers_and_quantised_tensors_run() -> None:
    z = torch.randn(4, dtype=torch.complex64)
    fused = fusion.fuse(lambda z: (z * z.conj()).real + z.abs())
    torch.testing.assert_close(fused(z), (z * z.conj()).real + z.abs())
    agree(lambda z: (torch.view_as_real(z * 2), z.imag + 1, z.conj()), z)


def test_distributed_tensors_are_compiled_in_their_parts() -> None:
    """One process that acts as the first of two; nothing is sent."""
    distributed = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])
        w = distribute_tensor(torch.randn(6, 4), mesh, [Replicate()]).requires_grad_()

        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ w, -1) * 2

        expected = f(x, w)
        (gradient,) = torch.autograd.grad(expected.to_local().square().sum(), w)
        got = fusion.fuse(f, options=STRICT)(x, w)
        assert type(got) is type(expected) and got.placements == expected.placements
        torch.testing.assert_close(got.to_local(), expected.to_local())
        got.to_local().square().sum().backward()
        assert w.grad.placements == gradient.placements
        torch.testing.assert_close(w.grad.to_local(), gradient.to_local())

        gather = fusion.fuse(lambda x: torch.relu(x.sum(0)).redistribute(placements=[Replicate()]) + 1, options=STRICT)
        assert gather(x).placements == (Replicate(),)
        assert any("all_reduce" in extern.name for extern in fusion.report(gather).externs)
    finally:
        distributed.destroy_process_group()
