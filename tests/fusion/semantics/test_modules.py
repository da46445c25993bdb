"""Modules: weights that are shared, replaced, moved and saved; hooks; modes of autograd and of training."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusion
from tests.fusion.agreement import STRICT, compare, differentiate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


class Tied(nn.Module):
    """The embedding and the last layer share weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


def fused_twin(net: nn.Module) -> nn.Module:
    return fusion.fuse(copy.deepcopy(net), options=STRICT)


def steps(net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    net.zero_grad()
    result = net(x)
    differentiate(result)
    return result.detach(), [parameter.grad for parameter in net.parameters()]


def test_tied_weights_get_one_gradient() -> None:
    net = Tied()
    fused = fused_twin(net)
    assert fused.head.weight is fused.embedding.weight
    tokens = torch.randint(0, 11, (4, 5))
    compare(steps(net, tokens), steps(fused, tokens), rtol=1e-5, atol=1e-5)


def test_train_and_eval_in_turn() -> None:
    net = Net()
    fused = fused_twin(net)
    for mode in (True, False, True, False):
        x = torch.randn(5, 6)
        compare(steps(net.train(mode), x), steps(fused.train(mode), x), rtol=1e-5, atol=1e-5)
    compare(dict(net.named_buffers()), dict(fused.named_buffers()))


def test_modes_of_autograd_in_turn() -> None:
    net = Net().eval()
    fused = fused_twin(net)
    x = torch.randn(5, 6)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            expected, got = net(x), fused(x)
            assert expected.is_inference() == got.is_inference()
        compare(expected, got, rtol=1e-5, atol=1e-6)


def test_modes_of_autograd_within() -> None:
    def f(x: torch.Tensor) -> object:
        with torch.no_grad():
            scale = x.abs().max()
        y = x / scale
        with torch.no_grad():
            z = y * 2
            with torch.enable_grad():
                w = x * 3
        return y, z, w, torch.is_grad_enabled()

    x = torch.randn(4, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    expected, got = f(x), fusion.fuse(f, options=STRICT)(twin)
    compare(expected, got)
    differentiate(expected)
    differentiate(got)
    compare(x.grad, twin.grad)


def test_inference_tensors_are_accepted() -> None:
    with torch.inference_mode():
        x = torch.randn(4)
    f = fusion.fuse(lambda x: x.exp() * 2, options=STRICT)
    torch.testing.assert_close(f(x), x.exp() * 2)


# Hooks --------------------------------------------------------------------------------------------------------------


def hooked(net: Net, kind: str, seen: list[object]) -> None:
    def forward(module: nn.Module, args: object, result: torch.Tensor) -> torch.Tensor:
        seen.append(("forward", tuple(result.shape)))
        return result * 2

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(("before", tuple(args[0].shape)))
        return (args[0] + 1,)

    def backward(module: nn.Module, given: object, built: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(("backward", tuple(built[0].shape)))
        return tuple(None if g is None else g * 3 for g in given)  # type: ignore[attr-defined]

    if kind == "forward":
        net.first.register_forward_hook(forward)
    elif kind == "before":
        net.first.register_forward_pre_hook(before)
    elif kind == "backward":
        net.second.register_full_backward_hook(backward)
    elif kind == "outermost":
        net.register_forward_hook(forward)
        net.register_forward_pre_hook(before)
    elif kind == "parameter":
        net.first.weight.register_hook(lambda g: g * 5)
    else:
        net.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum()) != 0))


@pytest.mark.parametrize("kind", ["forward", "before", "backward", "outermost", "parameter", "accumulated"])
def test_hooks_run_and_may_change_values(kind: str) -> None:
    plain = Net().eval()
    twin = copy.deepcopy(plain)
    seen: list[object] = []
    seen_fused: list[object] = []
    hooked(plain, kind, seen)
    hooked(twin, kind, seen_fused)
    fused = fusion.fuse(twin, options=STRICT)
    for _ in range(2):
        x = torch.randn(5, 6, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        compare((steps(plain, x), x.grad), (steps(fused, y), y.grad), strides=False, rtol=1e-5, atol=1e-5)
    assert seen == seen_fused


def test_hooks_run_where_another_instance_had_none() -> None:
    x, seen = torch.randn(5, 6), list[object]()
    fusion.fuse(Net().eval(), options=STRICT)(x)
    plain = Net().eval()
    twin = copy.deepcopy(plain)
    hooked(plain, "forward", [])
    hooked(twin, "forward", seen)
    compare(plain(x), fusion.fuse(twin, options=STRICT)(x), rtol=1e-5, atol=1e-5)
    assert seen


def test_hooks_on_tensors() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 10)
        return y.sin()

    x = torch.randn(4, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    f(x).sum().backward()
    fusion.fuse(f)(twin).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


def test_hooks_on_inputs_and_outputs() -> None:
    f = fusion.fuse(lambda x: x.sin(), options=STRICT)
    seen = []
    x = torch.randn(4, requires_grad=True)
    x.register_hook(lambda g: g * 2)
    y = f(x)
    y.register_hook(lambda g: seen.append(g.shape))
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    assert seen == [x.shape]


# Weights ------------------------------------------------------------------------------------------------------------


def replaced_data(net: Net) -> None:
    net.first.weight.data = torch.full_like(net.first.weight, 0.25)


def replaced_parameter(net: Net) -> None:
    net.first.weight = nn.Parameter(torch.full((8, 6), 0.5))


def loaded(net: Net) -> None:
    net.load_state_dict({key: torch.ones_like(value) for key, value in net.state_dict().items()})


def assigned(net: Net) -> None:
    net.load_state_dict({key: torch.ones_like(value) for key, value in net.state_dict().items()}, assign=True)


def changed_in_place(net: Net) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(-2)


def in_double(net: Net) -> None:
    net.double()


def in_half(net: Net) -> None:
    net.to(torch.bfloat16)


def with_another_layer(net: Net) -> None:
    net.second = nn.Linear(8, 7)
    net.second.weight.data.fill_(0.1)
    net.second.bias.data.fill_(0.2)


def frozen(net: Net) -> None:
    net.first.requires_grad_(False)


def without_bias(net: Net) -> None:
    net.first.bias = None


def with_other_numbers(net: Net) -> None:
    net.norm.eps = 0.5


@pytest.mark.parametrize(
    "change",
    [
        *(replaced_data, replaced_parameter, loaded, assigned, changed_in_place, in_double, in_half),
        *(with_another_layer, frozen, without_bias, with_other_numbers),
    ],
)
def test_weights_change_after_compilation(change: Callable[[Net], None]) -> None:
    net = Net().eval()
    fused = fused_twin(net)
    x = torch.randn(5, 6)
    compare(steps(net, x), steps(fused, x), rtol=1e-5, atol=1e-5)
    change(net)
    change(fused)
    x = x.to(net.first.weight.dtype)
    tolerance = 0.05 if change is in_half else 1e-5
    compare(steps(net, x), steps(fused, x), rtol=tolerance, atol=tolerance)


def test_copies_and_files() -> None:
    net = Net().eval()
    fused = fused_twin(net)
    x = torch.randn(5, 6)
    expected = fused(x)
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    other = fusion.fuse(Net().eval(), options=STRICT)
    other.load_state_dict(torch.load(file))
    for twin in (other, copy.deepcopy(fused), copy.copy(fused), pickle.loads(pickle.dumps(fused))):
        torch.testing.assert_close(twin(x), expected)
        assert fusion.report(twin).kernels
    assert {id(p) for p in copy.deepcopy(fused).parameters()}.isdisjoint({id(p) for p in fused.parameters()})
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in net.named_modules()]


def test_a_fused_part_of_a_model() -> None:
    net = Net().eval()
    x = torch.randn(5, 6)
    expected = net(x)
    net.first = fusion.fuse(net.first, options=STRICT)
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(fusion.fuse(net, options=STRICT)(x), expected)
    assert len(net.state_dict()) == 9


def test_modules_that_compute_their_weights() -> None:
    """PyTorch refuses to copy parametrised modules by pickling."""
    net = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
    fused = fusion.fuse(net, options=STRICT)
    x = torch.randn(5, 6)
    expected = steps(net, x)
    compare(expected, steps(fused, x), rtol=1e-5, atol=1e-5)
    assert fusion.report(fused).kernels


def test_several_fused_models_at_once() -> None:
    nets = [Net().eval(), nn.Sequential(nn.Linear(6, 6), nn.GELU()).eval(), Net().eval(), nn.LayerNorm(6)]
    fused = [fused_twin(net) for net in nets]
    for _ in range(2):
        x = torch.randn(5, 6)
        for net, twin in zip(nets, fused, strict=True):
            torch.testing.assert_close(twin(x), net(x))


def test_modules_of_pytorch_itself_are_compiled() -> None:
    """Dynamo does not begin at their code, nor does it compile one code for many backends."""
    x = torch.randn(5, 6)
    for width in range(10):
        net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, width + 1), nn.GELU()).eval()
        fused = fusion.fuse(net, options=STRICT)
        torch.testing.assert_close(fused(x), net(x), rtol=1e-5, atol=1e-6)
        assert len(fusion.report(fused).graphs) == 1


def test_methods() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        @fusion.fuse(options=STRICT)
        def forward(self, x: torch.Tensor, *, power: int = 2) -> torch.Tensor:
            return (x * self.weight) * power

        @staticmethod
        @fusion.fuse(options=STRICT)
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @classmethod
        @fusion.fuse(options=STRICT)
        def named(cls, x: torch.Tensor) -> tuple[str, torch.Tensor]:
            return cls.__name__, x + 1

        @property
        @fusion.fuse(options=STRICT)
        def squared(self) -> torch.Tensor:
            return self.weight * self.weight

    net, x = Scaled(), torch.randn(3, 4)
    torch.testing.assert_close(net(x, power=3), (x * net.weight) * 3)
    torch.testing.assert_close(Scaled.double(x), x * 2)
    name, result = net.named(x)
    assert name == "Scaled" and torch.equal(result, x + 1)
    torch.testing.assert_close(net.squared, net.weight**2)
    other = Scaled()
    torch.testing.assert_close(other(x), (x * other.weight) * 2)


def test_a_bound_method_is_fused_for_its_object() -> None:
    net = Net().eval()
    f = fusion.fuse(net.forward, options=STRICT)
    x = torch.randn(5, 6)
    torch.testing.assert_close(f(x), net(x))


class Translator(nn.Module):
    """PyTorch's own transformer, with a mask that is not declared causal."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.mask = nn.Parameter(torch.randn(5, 5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = self.mask + nn.Transformer.generate_square_subsequent_mask(5)
        return self.transformer(x, x, src_mask=self.mask, tgt_mask=causal)


def test_a_transformer_that_is_given_masks_is_one_graph() -> None:
    net, x = Translator(), torch.randn(2, 5, 8)
    fused = fused_twin(net)
    compare(steps(net, x), steps(fused, x), rtol=1e-4, atol=1e-5)
    report = fusion.report(fused)
    assert not report.graph_breaks and [graph.label for graph in report.graphs] == ["forward", "backward"]
