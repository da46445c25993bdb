"""The table of PyTorch's decompositions that run before the rules."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.lowering.aten.decompositions import (
    AS_THE_SECOND,
    FOR_TRAINING,
    KNOWN_AT_THE_CALL,
    MISTRACED,
    OTHERWISE_ROUNDED,
    addbmm,
    decompositions,
    max_unpool,
    softmax_backward,
    weight_norm_backward,
)
from fusion.lowering.registry import RULES

aten = torch.ops.aten


def test_operations_with_a_rule_are_not_decomposed():
    exceptions = {getattr(packet, name) for packet in FOR_TRAINING for name in packet.overloads()}
    exceptions |= {aten._softmax_backward_data.default, *OTHERWISE_ROUNDED, *MISTRACED, *KNOWN_AT_THE_CALL}  # our own
    exceptions |= {*AS_THE_SECOND}
    assert decompositions().keys() & RULES.keys() <= exceptions


def test_composites_without_a_rule_are_decomposed():
    for target in (
        aten.native_batch_norm_backward.default,
        aten._native_batch_norm_legit_functional.default,
        aten.nll_loss_forward.default,
        aten.huber_loss.default,
        aten.upsample_nearest2d.default,
    ):
        assert target in decompositions()


def test_composites_of_eager_decompose_by_themselves():
    """They are not in the table, because listing all of them takes longer than tracing a small program."""
    apart = (aten.linear.default, aten.einsum.default, aten.instance_norm.default)
    assert not decompositions().keys() & set(apart)

    def program(x, weight):
        y = torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
        return torch.einsum("bchw,dw->bchd", y, torch.nn.functional.linear(weight, weight))

    for mode in ("fake", "symbolic"):
        graph = make_fx(program, decompositions(), mode)(torch.randn(2, 3, 4, 4), torch.randn(4, 4))
        targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
        assert targets and not targets & set(apart)


def test_library_calls_are_not_decomposed():
    for target in (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.embedding_dense_backward.default,
        aten.convolution.default,
    ):
        assert target not in decompositions(exact=True)


def test_overwriting_with_zeros_keeps_strides():
    x = torch.randn(4, 5).T
    graph = make_fx(aten.zero.default, decomposition_table=decompositions(), tracing_mode="fake")(x)
    (result,) = graph.graph.output_node().all_input_nodes
    assert result.meta["val"].stride() == x.stride() == graph(x).stride()


INTO = {
    "slice": lambda x: x.slice_scatter(x[:1] + 1, 0, 1, 2),
    "select": lambda x: x.select_scatter(x[0] + 1, 0, 1),
    "diagonal": lambda x: x.diagonal_scatter(x.diagonal() + 1),
}


@pytest.mark.parametrize("name", INTO)
@pytest.mark.parametrize("shape", [(1, 3), (4, 1), (4, 3)])
def test_writes_into_expanded_tensors_have_the_strides_of_eager(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).expand(4, 3)
    graph = make_fx(INTO[name], decomposition_table=decompositions(), tracing_mode="fake")(x)
    (result,) = graph.graph.output_node().all_input_nodes
    assert result.meta["val"].stride() == INTO[name](x).stride() == graph(x).stride()
    assert torch.equal(graph(x), INTO[name](x))


OPERANDS = {
    "padded": lambda: torch.rand(4, 6)[:, :3],
    "contiguous": lambda: torch.rand(4, 3),
    "transposed": lambda: torch.rand(3, 4).T,
    "expanded": lambda: torch.rand(1, 3).expand(4, 3),
    "column": lambda: torch.rand(4, 1),
    "row": lambda: torch.rand(3),
    "turned": lambda: torch.rand(3, 2, 4).permute(1, 2, 0),
    "number": lambda: torch.rand((), dtype=torch.float64),
}


LAID_OUT = (*AS_THE_SECOND, partial(aten.div.Tensor_mode, rounding_mode="floor"))


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
@pytest.mark.parametrize("first", OPERANDS)
def test_results_have_the_layout_of_the_first_operand(first: str, tracing: str) -> None:
    """One trace holds all operands.  Under symbolic sizes, which take a hundred times as long, they take turns at the
    operations, whose decompositions are laid out by one function.
    """
    pairs = [(target, name) for name in OPERANDS for target in LAID_OUT]
    if tracing == "symbolic":
        pairs = pairs[[*OPERANDS].index(first) :: 8]  # each of the five operations once

    def program(x: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        by_name = dict(zip(OPERANDS, others, strict=True))
        return [target(x, by_name[name]) for target, name in pairs]

    given = OPERANDS[first](), *(make() for make in OPERANDS.values())
    graph = make_fx(program, decomposition_table=decompositions(), tracing_mode=tracing)(*given)
    (results,) = graph.graph.output_node().args
    for pair, result, got, expected in zip(pairs, results, graph(*given), program(*given), strict=True):
        strides = [int(stride) for stride in result.meta["val"].stride()]
        assert strides == list(expected.stride()) == list(got.stride()), pair
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
@pytest.mark.parametrize("order", [*permutations(range(3)), (0, 3, 1, 2), (0, 2, 1, 3), (3, 2, 1, 0)], ids=str)
def test_batch_norms_have_the_layout_of_eager(order: tuple[int, ...], tracing: str, training: bool) -> None:
    x = torch.randn((3, 4, 5, 6)[: len(order)]).permute(order)
    means, variances = torch.rand(2, x.shape[1]).unbind()

    def norm(x: torch.Tensor, means: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
        return torch.batch_norm(x, None, None, means.clone(), variances.clone(), training, 0.1, 1e-5, False)

    graph = make_fx(norm, decomposition_table=decompositions(), tracing_mode=tracing)(x, means, variances)
    (result,) = graph.graph.output_node().all_input_nodes
    expected = norm(x, means, variances)
    strides = [int(stride) for stride in result.meta["val"].stride()]
    assert strides == list(expected.stride()) == list(graph(x, means, variances).stride())


def volume(x: torch.Tensor) -> torch.Tensor:
    """Three images stacked as a volume, with channels last where the image has them."""
    form = torch.channels_last_3d if x.stride(1) == 1 else torch.contiguous_format
    return torch.stack([x] * 3, -1).contiguous(memory_format=form)


PICTURES = {
    "reflected": lambda x: F.pad(x, (1, 1, 0, 1), mode="reflect"),
    "reflected volume": lambda x: F.pad(volume(x), (1, 1, 0, 1, 1, 0), mode="reflect"),
    "repeated": lambda x: F.pad(x, (1, 1, 0, 1), mode="replicate"),
    "repeated volume": lambda x: F.pad(volume(x), (1, 1, 0, 1, 1, 0), mode="replicate"),
    "resized volume": lambda x: F.interpolate(volume(x), size=(3, 4, 5)),
    "resized exactly": lambda x: F.interpolate(volume(x), size=(3, 4, 5), mode="nearest-exact"),
    "shuffle": lambda x: torch.channel_shuffle(x, 3),
    "noise": lambda x: torch.normal(x, x.abs()),
    "noise around 1": lambda x: torch.normal(1.0, x.abs()),
    "noise of one size": lambda x: torch.normal(x, 1.0),
    "losses": lambda x: F.nll_loss(x, (x.sum(1) > 0).long(), reduction="none"),
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2), (3, 2, 1, 0)], ids=str)
def test_images_have_the_layout_of_eager(order: tuple[int, ...], name: str) -> None:
    x = torch.randn([(4, 6, 5, 3)[k] for k in order]).permute([order.index(k) for k in range(4)])
    graph = make_fx(PICTURES[name], decomposition_table=decompositions(), tracing_mode="fake")(x)
    (result,) = graph.graph.output_node().all_input_nodes
    assert result.meta["val"].stride() == PICTURES[name](x).stride() == graph(x).stride()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shuffled_channels_are_never_the_operand(groups: int) -> None:
    x = torch.randn(3, 4, 5)
    graph = make_fx(lambda x: torch.channel_shuffle(x, groups), decomposition_table=decompositions())(x)
    traced, expected = graph(x), torch.channel_shuffle(x, groups)
    assert torch.equal(traced, expected) and traced.data_ptr() != x.data_ptr() != expected.data_ptr()


def test_nothing_shares_no_memory() -> None:
    x = torch.empty(0).as_strided((0, 0, 1), (0, 1, 1))
    graph = make_fx(lambda x: x.slice_scatter(x + 1, 1), decomposition_table=decompositions(), tracing_mode="fake")(x)
    assert graph(x).shape == x.shape


def test_the_table_is_built_once():
    assert decompositions() is decompositions() is not decompositions(exact=True)


def with_bias(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    transposed = x.ndim == 3
    ones, zeros = [1] * (x.ndim - 2), [0] * (x.ndim - 2)
    settings = (ones, zeros, ones, transposed, zeros, 1)
    y = aten.convolution.default(x, weight, bias, *settings)
    gradients = aten.convolution_backward.default(grad, x, weight, [bias.numel()], *settings, [True, False, True])
    alone = aten.convolution_backward.default(grad, x, weight, [bias.numel()], *settings, [False, False, True])
    return y, gradients[0], gradients[2], alone[2]


@pytest.mark.parametrize(
    "shapes", [((2, 3, 8, 7), (4, 3, 3, 3), (4,), (2, 4, 6, 5)), ((2, 3, 8), (3, 4, 3), (4,), (2, 4, 10))]
)
def test_the_bias_of_a_convolution_on_a_gpu_is_a_map(shapes: tuple[tuple[int, ...], ...]):
    with FakeTensorMode():
        on_gpu, on_cpu = (
            make_fx(with_bias, decomposition_table=decompositions())(*(torch.empty(s, device=device) for s in shapes))
            for device in ("cuda", "cpu")
        )
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for apart, whole in zip(on_gpu(*given), with_bias(*given), strict=True):
        torch.testing.assert_close(apart, whole)
    calls = [node for node in on_gpu.graph.nodes if node.target in OTHERWISE_ROUNDED]
    assert [node.args[2] for node in calls[:1]] == [None] and calls[1].args[-1] == [True, False, False]
    assert len(calls) == 2
    assert not any(node.target is aten.add.Tensor for node in on_cpu.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_parts_of_a_softmax_backward_round_once(dtype: torch.dtype, dim: int):
    grad, output = (torch.randn(5, 7, 300) + 1).to(dtype), torch.randn(5, 7, 300).softmax(dim).to(dtype)
    exact = aten._softmax_backward_data(grad.double(), output.double(), dim, torch.float64)
    got = softmax_backward(grad, output, dim, dtype)
    assert got.dtype is dtype
    eager = aten._softmax_backward_data(grad, output, dim, dtype)
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-15


def test_a_softmax_backward_into_a_half_stays_wide_until_the_end():
    """As autograd calls it for `softmax(x, dtype=torch.float32)` of a half."""
    grad, output = torch.randn(5, 300), torch.randn(5, 300).softmax(1)
    wide = aten._softmax_backward_data(grad, output, 1, torch.float32)
    got = softmax_backward(grad, output, 1, torch.float16)
    assert got.dtype is torch.float16
    torch.testing.assert_close(got.float(), wide, rtol=2**-11, atol=2**-24)


def test_backward_shows_its_sums():
    def gradients(x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        first = aten._softmax_backward_data(g, x.softmax(1), 1, x.dtype)
        return [first, aten._log_softmax_backward_data(g, x.log_softmax(1), 1, x.dtype)]

    x, g = torch.randn(3, 9), torch.randn(3, 9)
    graph = make_fx(gradients, decomposition_table=decompositions())(x, g)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(aten.sum.dim_IntList) == 4
    assert not {aten._softmax_backward_data.default, aten._log_softmax_backward_data.default} & set(targets)
    torch.testing.assert_close(graph(x, g), gradients(x, g))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((7, 5, 3), 0), ((7, 5, 3), 2), ((300, 9), 1), ((6,), 0)])
def test_the_gradients_of_a_normed_weight(dtype: torch.dtype, shape: tuple[int, ...], dim: int):
    sizes = [n if k == dim else 1 for k, n in enumerate(shape)]
    v, grad, g = (torch.randn(size).add(0.5).to(dtype) for size in (shape, shape, sizes))
    _, norms = aten._weight_norm_interface(v, g, dim)
    wide = [x.double() for x in (grad, v, g, norms)]
    exact = aten._weight_norm_interface_backward(*wide, dim)
    eager = aten._weight_norm_interface_backward(grad, v, g, norms, dim)
    for got, theirs, true in zip(weight_norm_backward(grad, v, g, norms, dim), eager, exact, strict=True):
        assert got.dtype is dtype and got.shape == true.shape
        allowed = 2 * (theirs - true).abs().max() + 4 * torch.finfo(dtype).eps * (1 + true.abs().max())
        assert (got - true).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_sum_of_products_is_one_product(dtype: torch.dtype):
    x, a, b = torch.arange(4), torch.arange(30).view(2, 3, 5) % 7, torch.arange(40).view(2, 5, 4) % 5
    operands = [tensor.to(dtype) for tensor in (x, a, b)]
    assert torch.equal(addbmm(*operands, beta=3, alpha=2), torch.addbmm(*operands, beta=3, alpha=2))


@pytest.mark.parametrize(("device", "strides"), [("cpu", (96, 1, 12, 2)), ("meta", (96, 48, 6, 1))])
def test_unpooling_keeps_channels_last_on_a_cpu(device: str, strides: tuple[int, ...]):
    x = torch.ones(1, 2, 4, 3, device=device).contiguous(memory_format=torch.channels_last)
    positions = torch.zeros(x.shape, dtype=torch.int64, device=device)
    assert max_unpool(x, positions, (8, 6)).stride() == strides
