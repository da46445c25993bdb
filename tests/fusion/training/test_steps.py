"""Training as people write it: autocast, accumulated gradients, checkpoints, clipping, scaling."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusion
import fusion.compilation.graph_compiler
from tests.fusion.agreement import STRICT, agree, compare, differentiate


class Block(nn.Module):
    def __init__(self, width: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(F.gelu(self.wide(self.norm(x)))))


def twins(net: nn.Module) -> tuple[nn.Module, nn.Module]:
    return net, fusion.fuse(copy.deepcopy(net), options=STRICT)


def grads(net: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in net.parameters()]


# Autocast -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["outside", "inside", "part", "off_inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(where: str, dtype: torch.dtype) -> None:
    net = nn.Sequential(Block(), Block())

    def plain(x: torch.Tensor) -> torch.Tensor:
        return net(x)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return net(x)

    def part(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            y = net[0](x)
        return net[1](y.float())

    def off_inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return net(x)

    f = {"outside": plain, "inside": inside, "part": part, "off_inside": off_inside}[where]
    around = torch.autocast("cpu", dtype, enabled=where in ("outside", "off_inside"))
    x = torch.randn(4, 16)
    exact = copy.deepcopy(net).double()(x.double())
    fused = fusion.fuse(f, options=STRICT)
    with around:
        expected, got = f(x), fused(x)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    error = float((expected.double() - exact).abs().max())
    assert float((got.double() - exact).abs().max()) <= 2 * error + 1e-5
    weights = list(net.parameters())
    mine = torch.autograd.grad(expected.float().sum(), weights)
    yours = torch.autograd.grad(got.float().sum(), weights)
    for a, b in zip(mine, yours, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(b, a, rtol=0.06, atol=0.06)


def test_autocast_on_and_off_in_turn() -> None:
    layer = nn.Linear(8, 8)
    fused = fusion.fuse(layer, options=STRICT)
    x = torch.randn(3, 8)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad():
            assert fused(x).dtype is (torch.bfloat16 if enabled else torch.float32)


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulated_gradients(to_none: bool) -> None:
    plain, fused = twins(Block())
    for _ in range(2):
        for net in (plain, fused):
            net.zero_grad(set_to_none=to_none)
        for _ in range(3):
            x = torch.randn(4, 16)
            for net in (plain, fused):
                (net(x).square().mean() / 3).backward()
        compare(grads(plain), grads(fused), strides=False, rtol=1e-4, atol=1e-6)


def test_gradients_of_some_inputs_only() -> None:
    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (a * b).softmax(-1) @ c + a.sum() * c

    shapes = ((5, 5), (5, 5), (5, 5))
    for mask in range(1, 8):
        inputs = [torch.randn(s).requires_grad_(bool(mask >> k & 1)) for k, s in enumerate(shapes)]
        agree(f, *inputs, backward=True, rtol=1e-4, atol=1e-5)


def test_frozen_layers_get_no_gradient() -> None:
    net = nn.Sequential(Block(), Block(), nn.Linear(16, 3))
    net[0].requires_grad_(False)
    plain, fused = twins(net)
    x = torch.randn(4, 16)
    differentiate(plain(x))
    differentiate(fused(x))
    assert all(p.grad is None for p in fused[0].parameters())
    compare(grads(plain), grads(fused), strides=False, rtol=1e-4, atol=1e-5)


def test_outputs_that_are_not_differentiated() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y.sum(), y.detach() * 2, y.argmax(), (x > 0).sum(), y

    x = torch.randn(6, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    compare(f(x), fusion.fuse(f, options=STRICT)(twin))
    f(x)[0].backward()
    fusion.fuse(f, options=STRICT)(twin)[0].backward()
    compare(x.grad, twin.grad)


def test_backward_twice() -> None:
    f = fusion.fuse(lambda x: (x.sin() * x.exp()).sum(), options=STRICT)
    x = torch.randn(6, requires_grad=True)
    loss = f(x)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("sizes", [(6, 6), (6, 8, 9)], ids=["static", "dynamic"])
def test_backward_twice_where_the_first_call_kept_no_graph(sizes: tuple[int, ...]) -> None:
    f = fusion.fuse(lambda x: (x.sin() * x.exp()).cumsum(0).exp().sum(), options=STRICT)
    for size in sizes:
        x = torch.linspace(-1, 1, size).requires_grad_()
        f(x).backward()
        first, x.grad = x.grad, None
    loss = f(x)
    (2 * loss).backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, 3 * first)
    (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
    torch.testing.assert_close(gradient, first)


@pytest.mark.parametrize("seen", ["by nobody", "by another backward", "by hooks"])
def test_the_gradient_overwrites_logits_unless_they_have_other_references(
    seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor saved for backward alone is overwritten; if there are other references, a copy is."""

    def loss(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ w, labels)

    torch._dynamo.reset()
    logits = 1100, 1000
    x, w = (torch.randn(logits[0], 600) / 9).requires_grad_(), torch.randn(600, logits[1], requires_grad=True)
    labels = torch.randint(logits[1], logits[:1])
    expected = torch.autograd.grad(loss(x, w, labels), (x, w))
    backend, copied, packed = fusion.Backend(fusion.Options(strict=True)), list[object](), list[torch.Tensor]()
    clone = torch.Tensor.clone

    def counted(tensor: torch.Tensor, **how: object) -> torch.Tensor:
        copied.extend([tensor.dtype] if tensor.shape == logits else [])
        return clone(tensor, **how)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks if seen == "by hooks" else contextlib.nullcontext():
        result = torch.compile(loss, backend=backend)(x, w, labels)
    before = [tensor.clone() for tensor in packed]
    monkeypatch.setattr(torch.Tensor, "clone", counted)
    for keeps in (True, False) if seen == "by another backward" else (False,):
        gradients = torch.autograd.grad(result, (x, w), retain_graph=keeps)
        torch.testing.assert_close(gradients, expected)
    assert len(copied) == (seen != "by nobody")
    assert all(torch.equal(tensor, as_it_was) for tensor, as_it_was in zip(packed, before, strict=True))
    assert "take_over" in {extern.name for extern in backend.reports[-1].externs}


def test_several_forwards_before_their_backwards() -> None:
    f = fusion.fuse(lambda x: F.dropout(x, 0.5) * x, options=STRICT)
    inputs = [(torch.rand(50) + 1).requires_grad_() for _ in range(3)]
    results = [f(x) for x in inputs]
    for x, y in reversed(list(zip(inputs, results, strict=True))):
        y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * y.detach() / x.detach())


def test_second_derivatives_within() -> None:
    def penalty(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda v: (v.sin() * v).sum())(x).square().sum()

    x = torch.randn(5, requires_grad=True)
    (expected,) = torch.autograd.grad(penalty(x), x)
    (got,) = torch.autograd.grad(fusion.fuse(penalty)(x), x)
    torch.testing.assert_close(got, expected)


# Checkpoints --------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, p: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16, p), Block(16, p)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    plain, fused = Checkpointed(reentrant, 0.0), None
    fused = fusion.fuse(copy.deepcopy(plain))
    x = torch.randn(4, 16, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    differentiate(plain(x))
    differentiate(fused(twin))
    compare((grads(plain), x.grad), (grads(fused), twin.grad), strides=False, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_fused_blocks(reentrant: bool) -> None:
    block = Block(16, 0.5)
    fused = fusion.fuse(block)
    x = (torch.rand(8, 16) + 1).requires_grad_()
    y = checkpoint(fused, x, use_reentrant=reentrant)
    y.sum().backward()
    first = x.grad.clone()
    x.grad = None
    block.zero_grad()
    torch.manual_seed(3)
    fused(x).sum().backward()
    torch.manual_seed(3)
    checked = x.grad.clone()
    x.grad = None
    checkpoint(fused, x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, checked)
    assert not torch.equal(first, checked)


DRAWN_AGAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda v: F.dropout(v * 2, 0.5),
    "two": lambda v: F.dropout(F.dropout(v * 2, 0.2) * torch.rand_like(v), 0.2),
    "rrelu": lambda v: F.rrelu(-v, 0.1, 0.9, training=True),
    "no_rule": lambda v: v * torch.poisson(torch.full_like(v, 4.0)),
}


@pytest.mark.parametrize("numerics", ["default", "strict"])
@pytest.mark.parametrize("name", DRAWN_AGAIN)
def test_a_checkpoint_draws_the_same_numbers_again(name: str, numerics: str) -> None:
    """y = x·m with a random m that y shows: dy/dx is y / x, where backward draws m again from a saved seed."""
    function = DRAWN_AGAIN[name]
    fused = fusion.fuse(
        lambda x: checkpoint(function, x, use_reentrant=False), options={**STRICT, "numerics": numerics}
    )
    first = None
    for _ in range(2):
        x = (torch.rand(200) + 1).requires_grad_()
        y = fused(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach() / x.detach())
        assert first is None or not torch.equal(first, x.grad)
        first = x.grad
    assert not any(graph.failure for graph in fusion.report(fused).graphs)


@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_attention_without_dropout_is_recomputed_without_a_seed(numerics: str) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x.sin(), x, x, is_causal=True)

    options = {**STRICT, "numerics": numerics}
    fused = fusion.fuse(lambda x: checkpoint(attend, x, use_reentrant=False) * 2, options=options)
    x, y = (torch.linspace(-1, 1, 2 * 2 * 48 * 64).view(2, 2, 48, 64).requires_grad_() for _ in range(2))
    torch.autograd.backward((fused(x), attend(y) * 2), (torch.ones_like(x), torch.ones_like(y)))
    torch.testing.assert_close(x.grad, y.grad)
    backward = fusion.report(fused).graphs[1]
    calls = [call.name for graph in fusion.report(fused).graphs for call in graph.externs]
    assert not {"seeded", "aten.randint.low"} & set(calls)
    assert sum("attention" in call.name for call in backward.externs) == 2


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_where_one_half_of_a_checkpoint_cannot_be_compiled_it_draws_the_same(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_graph = fusion.compilation.graph_compiler.compile_graph

    def only_other_half(graph: torch.fx.GraphModule, options: object, label: str, *others: object) -> object:
        if label == half:
            raise RuntimeError(f"a defect in {half}")
        return compile_graph(graph, options, label, *others)

    monkeypatch.setattr(fusion.compilation.graph_compiler, "compile_graph", only_other_half)
    fused = fusion.fuse(lambda x: checkpoint(lambda v: F.dropout(v.exp(), 0.5), x, use_reentrant=False))
    x = (torch.rand(200) + 1).requires_grad_()

    def run() -> torch.Tensor:
        y = fused(x)
        y.sum().backward()
        return y

    with pytest.warns(fusion.FusionWarning, match="a defect"):
        y = run()
    torch.testing.assert_close(x.grad, y.detach())
    assert any(graph.kernels for graph in fusion.report(fused).graphs)


# What stands around a step ------------------------------------------------------------------------------------------


def clipped(parameters: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, 0.1)


@pytest.mark.parametrize(
    "clip", [clipped, lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01)], ids=["norm", "value"]
)
def test_clipping(clip: Callable[[list[torch.Tensor]], object]) -> None:
    def parameters_with_gradients() -> list[torch.Tensor]:
        torch.manual_seed(2)
        parameters = [torch.zeros(shape, requires_grad=True) for shape in ((5, 3), (7,), (2, 2, 2), ())]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        return parameters

    mine, yours = parameters_with_gradients(), parameters_with_gradients()
    compare(clip(mine), fusion.fuse(clip, options=STRICT)(yours))
    compare([p.grad for p in mine], [p.grad for p in yours])


@pytest.mark.parametrize("overflow", [False, True])
def test_scaled_gradients(overflow: bool) -> None:
    """Loss scaling as `torch.amp.GradScaler` does it: a step is skipped where a gradient overflows."""
    plain, fused = twins(Block())
    for net in (plain, fused):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(4, 16) * (torch.inf if overflow and step == 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0**9 if overflow else 2.0**10)
    compare(list(plain.parameters()), list(fused.parameters()), rtol=1e-4, atol=1e-6)
