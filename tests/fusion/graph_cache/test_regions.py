"""Cached regions: a second start traces nothing and returns the same; changed regions are traced again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fusion.compilation.graph_compiler
from fusion.attention import Choice, choose
from fusion.backend import Backend, FusionWarning
from fusion.options import Options
from tests.fusion.graph_cache.starts import leaf, no_tracing, notes, run, started

Inputs = Callable[[], Sequence[Tensor]]


@pytest.fixture
def traced(cache: Path) -> Path:
    """Where regions are kept for this test alone."""
    return cache.parent / "regions"


def in_place(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(y)
    return x.sum(0) + y


def views(x: Tensor) -> tuple[Tensor, ...]:
    return x[1:], x.t(), *(x * 2).split(2)


def itself(x: Tensor) -> tuple[Tensor, ...]:
    return x, x.exp()


def of_sizes(x: Tensor) -> Tensor:
    return (x.exp() / x.shape[0]).reshape(-1) if x.shape[1] > 3 else x.sin()


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda x: (x.sin() @ x.t()).cos(), x, use_reentrant=False)


def autocast_to_16_bits(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.t()).float().softmax(-1)


def indexed(x: Tensor) -> Tensor:
    return x[..., 1:2, None] * x[:, ::2, None].sum()


def mapped(x: Tensor) -> Tensor:
    return F.pad(x, (1, 2)).argmax(-1)


def normalised(x: Tensor) -> Tensor:
    return F.layer_norm(x, (6,)).sin()


PROGRAMS: list[tuple[Callable[..., object], Inputs, dict[str, object]]] = [
    (lambda x, w: torch.softmax(x @ w, -1), lambda: (torch.randn(5, 7), torch.randn(7, 9)), {}),
    (lambda x, w: torch.softmax(x @ w, -1), lambda: (leaf(5, 7), leaf(7, 9)), {"numerics": "strict"}),
    (normalised, lambda: (leaf(4, 6),), {}),
    (in_place, lambda: (torch.randn(4, 3), leaf(4, 3)), {}),
    (views, lambda: (leaf(4, 3),), {}),
    (itself, lambda: (leaf(4, 3),), {}),
    (of_sizes, lambda: (leaf(5, 7),), {"dynamic": True}),
    (checkpointed, lambda: (leaf(5, 7),), {}),
    (lambda x: F.dropout(x, 0.5) + torch.rand_like(x), lambda: (leaf(40, 3),), {}),
    (autocast_to_16_bits, lambda: (leaf(5, 7),), {}),
    (indexed, lambda: (leaf(3, 5, 4),), {}),
    (mapped, lambda: (torch.randn(3, 5),), {}),
    (lambda x: x * torch.tensor([1.0, -0.0, 5.0]), lambda: (leaf(4, 3),), {}),
]


@pytest.mark.parametrize(("function", "make", "settings"), PROGRAMS)
def test_a_second_start_traces_nothing_and_gives_the_same(function, make, settings, monkeypatch):
    given = make()
    first, cold, strides = run(function, given, **settings)
    assert "from the cache" not in cold
    no_tracing(monkeypatch)
    second, result, same_strides = run(function, given, **settings)
    assert [note for note in result if note not in cold] == ["from the cache"] * len(result)
    assert all(map(torch.equal, first, second))
    assert strides == same_strides


def attended(x: Tensor) -> Tensor:
    """Attention of 2 heads to x itself."""
    heads = x.view(2, 5, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads.sin(), heads, is_causal=True)


def test_a_second_start_traces_no_decomposed_attention(monkeypatch):
    """The call of its operations, a function of this compiler, must not count as one of the program's."""
    monkeypatch.setattr(choose, "choose", lambda call, origin, *_, **others: Choice(origin, True, "", 2.0, 1.0))
    given = (leaf(20, 4),)
    first, cold, strides = run(attended, given)
    assert any(note.startswith("attention") and "generated" in note for note in cold)
    no_tracing(monkeypatch)
    second, result, same_strides = run(attended, given)
    assert [note for note in result if note not in cold] == ["from the cache"] * 2
    assert all(map(torch.equal, first, second))
    assert strides == same_strides


def test_a_second_start_loads_the_parts_around_an_untraceable_operation(monkeypatch):
    def f(x: Tensor, v: Tensor) -> Tensor:
        y = x.sin() * 2
        y[x > 0] = v
        return y.exp() * x

    x = leaf(4, 3)
    given = (x, leaf(int((x > 0).sum())))
    first, cold, strides = run(f, given, strict=False)
    assert "from the cache" not in cold
    no_tracing(monkeypatch)
    second, result, same_strides = run(f, given, strict=False)
    assert result.count("from the cache") == 4, "forward and backward of two parts"
    assert all(map(torch.equal, first, second))
    assert strides == same_strides


def test_buffers_are_changed_and_gradients_added_up_as_at_the_first_start(monkeypatch):
    states: list[list[Tensor]] = []
    for start in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU())
        torch._dynamo.reset()
        fused = torch.compile(model, backend=Backend(Options.read(None, {"strict": True})))
        for _ in range(3):
            loss = fused(torch.randn(2, 3, 6, 6)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        states.append([*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)])
        if start == 0:
            no_tracing(monkeypatch)
    assert len(states[0]) == 11
    assert all(map(torch.equal, *states))


def test_sizes_that_were_not_there_run_as_kept(monkeypatch):
    run(of_sizes, (leaf(5, 7),), dynamic=True)
    no_tracing(monkeypatch)
    torch._dynamo.reset()
    fused = torch.compile(of_sizes, backend=Backend(Options.read(None, {"strict": True})), dynamic=True)
    for shape in ((5, 7), (4, 9)):
        x = torch.randn(shape, requires_grad=True)
        torch.testing.assert_close(fused(x), of_sizes(x))
    with pytest.raises(BackendCompilerFailed, match="traced again"):  # the guard was kept, too
        fused(leaf(5, 3))


def test_inputs_without_a_path_have_no_gradient_at_either_start(monkeypatch):
    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), y.cos()

    for start in range(2):
        x, y = leaf(3), leaf(3)
        torch._dynamo.reset()
        torch.compile(two, backend=Backend(Options.read(None, {"strict": True})))(x, y)[0].sum().backward()
        assert y.grad is None
        assert x.grad is not None
        if start == 0:
            no_tracing(monkeypatch)


def test_inputs_are_let_go_by_backward_at_either_start():
    for _ in range(2):
        torch._dynamo.reset()
        fused = torch.compile(lambda h, x: h + x.sum(), backend=Backend(Options.read(None, {"strict": True})))
        hidden, x = leaf(3) * 2, torch.randn(3)
        seen = [weakref.ref(hidden), weakref.ref(x)]
        out = fused(hidden, x)
        del hidden, x
        out.sum().backward()
        assert [each() for each in seen] == [None, None]
        assert out.grad_fn is not None


def test_second_derivatives_agree_with_eager_at_either_start(monkeypatch):
    for start in range(2):
        torch._dynamo.reset()
        fused = torch.compile(lambda x: x.exp().sin(), backend=Backend(Options()))
        x = leaf(4)
        (first,) = torch.autograd.grad(fused(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        (expected,) = torch.autograd.grad(torch.autograd.grad(x.exp().sin().sum(), x, create_graph=True)[0].sum(), x)
        torch.testing.assert_close(second, expected)
        if start == 0:
            no_tracing(monkeypatch)


def test_a_cached_region_runs_eagerly_where_the_first_start_does(monkeypatch):
    def function(x: Tensor) -> Tensor:
        return torch.cat([x.exp(), x])[1:, :2] * torch.tensor([2.0, 3.0])

    x = torch.randn(3, 4)
    with torch.no_grad():
        run(function, (x,))
        no_tracing(monkeypatch)
        torch._dynamo.reset()
        backend = Backend(Options())
        fused = torch.compile(function, backend=backend)
        fused(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.warns(FusionWarning, match="forward-mode derivatives"):
                tangent = forward_ad.unpack_dual(fused(dual)).tangent
            expected = forward_ad.unpack_dual(function(dual)).tangent
    torch.testing.assert_close(tangent, expected)
    assert backend.reports[-1].externs


@torch.library.custom_op("fusion_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def of_data(x: Tensor) -> Tensor:
    return x.nonzero().sum(0) * 2


def branched(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) * 2


def changed_first_half(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x + y


def overlapping_halves() -> tuple[Tensor, ...]:
    base = torch.randn(8)
    return base[:4], base[2:6]


@pytest.mark.parametrize(
    ("function", "make", "reason"),
    [
        (lambda x: doubled(x) + 1, lambda: (leaf(4),), "a call of doubled.default, which is not PyTorch's"),
        (lambda x: Squared.apply(x.sin()) + 1, lambda: (leaf(4),), "which is not PyTorch's"),
        (lambda x: x.sin() + 1, lambda: (TwoTensor(torch.randn(3), torch.randn(3)),), "TwoTensor"),
        (branched, lambda: (torch.randn(4),), "which is not PyTorch's"),
        (changed_first_half, overlapping_halves, "its inputs share memory"),
    ],
    ids=["operation", "gradient", "subclass", "graphs", "memory"],
)
def test_a_region_that_may_differ_at_the_next_start_is_traced_anew(function, make, reason, traced):
    torch._dynamo.reset()
    backend = Backend(Options())
    torch.compile(function, backend=backend)(*make())
    reported = [note for report in backend.reports for note in report.notes if note.startswith("not kept")]
    assert any(reason in note for note in reported), reported
    assert not traced.exists()


def test_inputs_that_are_compared_at_each_call_are_traced_anew(traced):
    base = torch.randn(8)
    torch._dynamo.reset()
    backend = Backend(Options())
    torch.compile(changed_first_half, backend=backend, dynamic=True)(base[:4], base[4:])
    assert "not kept in the cache: its inputs share memory" in backend.reports[0].notes
    assert not traced.exists()


def test_a_view_that_pytorch_serializes_wrongly_is_traced_anew(traced):
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        product = x @ y  # its rows are those of a matrix, of which the result is an `_unsafe_view`
        return product, product.diagonal()

    _, reported, _ = run(function, (leaf(2, 5, 4), leaf(4, 5)))
    assert any("does not write rightly (_unsafe_view_ViewMeta)" in note for note in reported), reported
    assert not traced.exists()


def test_numbers_that_are_drawn_again_are_traced_anew(traced):
    def dropped(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False)

    run(dropped, (leaf(40),))
    assert not traced.exists()


def test_a_backward_compiled_under_other_settings_is_not_cached_with_forward(traced):
    def products(x: Tensor) -> Tensor:
        return (x @ x.t()).sin()

    try:
        backend = Backend(Options())
        result = torch.compile(products, backend=backend)(leaf(4, 3))
        torch.set_float32_matmul_precision("high")
        result.sum().backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "not kept in the cache: settings were changed before its backward was compiled" in backend.reports[-1].notes
    assert not traced.exists()


@pytest.mark.parametrize("setting", ["graph_cache", "dump", "cudagraphs"])
def test_nothing_is_kept_where_that_is_not_wished(setting, traced, tmp_path):
    run(
        torch.sigmoid,
        (torch.randn(4),),
        **{setting: {"graph_cache": False, "dump": tmp_path, "cudagraphs": True}[setting]},
    )
    assert not traced.exists()


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "of another user", "a folder", "without its graph"])
def test_a_damaged_region_is_traced_anew(harm, traced, cache, monkeypatch):
    if harm == "of another user" and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    x = leaf(4, 3)
    first, _, _ = run(torch.sigmoid, (x,))
    (path,) = traced.iterdir()
    content = bytearray(path.read_bytes())
    if harm == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes({"cut": content[:-3], "empty": b""}.get(harm, bytes(content)))
    if harm == "without its graph":
        next(cache.iterdir()).unlink()
    if harm == "of another user":
        os.chown(path, 12345, -1)
    if harm == "a folder":
        path.unlink()
        path.mkdir()
    second, reported, _ = run(torch.sigmoid, (x,))
    assert all(map(torch.equal, first, second))
    assert ("its entry in the cache was damaged" in reported) == (harm != "without its graph")
    no_tracing(monkeypatch)
    third, result, _ = run(torch.sigmoid, (x,))
    assert all(map(torch.equal, first, third))
    assert result == ["from the cache"] * 2


def test_an_entry_that_cannot_be_loaded_is_traced_anew(monkeypatch):
    run(torch.sigmoid, (leaf(4),))

    def fail(*args: object) -> object:
        raise RuntimeError("a defect")

    monkeypatch.setattr(fusion.compilation.graph_compiler, "load_finished", fail)
    _, reported, _ = run(torch.sigmoid, (leaf(4),))
    assert reported == ["not taken from the cache: RuntimeError: a defect", *["from the cache"] * 2]


def test_another_backend_uses_pytorchs_own_cache(traced):
    started(torch.sigmoid, leaf(4))
    assert len(list(traced.iterdir())) == 1
    with torch._functorch.config.patch(force_autograd_cache=True):
        result = torch.compile(lambda x: x.sigmoid() * 2, backend="aot_eager")(x := leaf(4))
    torch.testing.assert_close(result, x.sigmoid() * 2)
    assert len(list(traced.iterdir())) == 1


def test_a_report_of_a_second_start_is_that_of_the_first(monkeypatch):
    x = leaf(4, 6)
    _, cold = started(normalised, x)
    no_tracing(monkeypatch)
    _, result = started(normalised, x)
    assert notes(result) == ["from the cache"] * 2
    assert result.kernels == cold.kernels
