"""Library calls on a device, with operands that kernels compute: padded masks, slices, transposed or expanded tensors.

A library's kernel may assume strides or alignments, and read wrong numbers if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusion

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BATCH, HEADS, ROWS, WIDTH = 2, 4, 7, 8


def as_near_as_eager(program: Callable[..., object], *inputs: Tensor, numerics: str = "default") -> fusion.Explanation:
    """Results and gradients are at most twice as far from float64 as eager's; return the report."""
    fused = fusion.fuse(program, options={"strict": True, "numerics": numerics})
    exact, eager, ours = (
        outcome(run, [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in inputs])
        for run, dtype in ((program, torch.float64), (program, inputs[0].dtype), (fused, inputs[0].dtype))
    )
    for mine, theirs, true in zip(ours, eager, exact, strict=True):
        assert mine.shape == theirs.shape and mine.dtype is theirs.dtype
        allowed = 2 * (theirs - true).norm() + torch.finfo(theirs.dtype).eps * true.norm()
        assert (mine - true).norm() <= allowed
    report = fusion.report(fused)
    assert any(graph.kernels for graph in report.graphs) and not any(graph.failure for graph in report.graphs)
    return report


def outcome(program: Callable[..., object], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results of a program, and gradients of their sum, with a weight for each element."""
    example = program(*inputs)
    results = [example] if isinstance(example, Tensor) else list(example)
    weights = [torch.linspace(-1, 2, x.numel(), device=x.device, dtype=x.dtype).view(x.shape) for x in results]
    wanted = [x for x in inputs if x.requires_grad]
    return [*results, *torch.autograd.grad(results, wanted, weights)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, wanted: bool = True) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=wanted)


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Heads of the result of a product, in the layout of models."""
    return (x @ weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "given"])
@pytest.mark.parametrize("columns", [13, 14, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_with_a_mask_that_is_added(dtype: torch.dtype, columns: int, trained: bool) -> None:
    """Shared by batches, by heads, by both or by none; PyTorch pads its rows and slices them."""

    def attend(x: Tensor, y: Tensor, weight: Tensor, *masks: Tensor) -> list[Tensor]:
        q, k, v = heads(x, weight), heads(y, weight), heads(y * 2, weight)
        return [F.scaled_dot_product_attention(q, k, v, attn_mask=mask * 2, scale=1.0) for mask in masks]

    width = HEADS * WIDTH
    shapes = (BATCH, HEADS), (1, HEADS), (BATCH, 1), (1, 1)
    masks = [drawn(*lead, ROWS, columns, dtype=dtype, wanted=trained) for lead in shapes]
    given = drawn(BATCH, ROWS, width, dtype=dtype), drawn(BATCH, columns, width, dtype=dtype)
    report = as_near_as_eager(attend, *given, (drawn(width, width, dtype=dtype) / 6).detach(), *masks)
    assert any("scaled_dot_product" in call.name for graph in report.graphs for call in graph.externs)


def test_attention_in_which_a_mask_forbids() -> None:
    """The least number of the type, as transformers adds it, in addition to positions of an embedding table."""

    def attend(x: Tensor, weight: Tensor, table: Tensor, kept: Tensor) -> Tensor:
        here = torch.arange(x.shape[1], device=x.device)
        bias = table[(here[:, None] - here).abs()].permute(2, 0, 1).unsqueeze(0)
        mask = torch.where(kept[:, None, None] > 0, bias, torch.finfo(x.dtype).min)
        q, k, v = (heads(x * n, weight) for n in (1, 2, 3))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.contiguous(), scale=0.3)

    kept = torch.ones(BATCH, 14, device=DEVICE)
    kept[1, :4] = 0
    as_near_as_eager(attend, drawn(BATCH, 14, 32), drawn(32, 32) / 6, drawn(14, HEADS), kept)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize(
    "kind", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=str
)
def test_attention_by_each_kernel_of_the_library(kind: SDPBackend, causal: bool) -> None:
    def attend(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (heads(x * n, weight) for n in (1, 2, 3))
        attended = F.scaled_dot_product_attention(q.cos(), k, v[:, :, :, ::1], is_causal=causal)
        return attended.transpose(1, 2).flatten(2)

    x, weight = drawn(2, 19, 64, dtype=torch.bfloat16), (drawn(64, 64, dtype=torch.bfloat16) / 8).detach()
    with sdpa_kernel([kind, SDPBackend.MATH]):  # the latter in float64
        as_near_as_eager(attend, x, weight.requires_grad_())


@pytest.mark.parametrize("first", [0, 1], ids=["heads first", "positions first"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
def test_cudnn_reads_gradients_of_attention_in_any_layout(masked: bool, first: int) -> None:
    """Whichever layout eager, or another program, had before for operands of equal shapes and strides."""
    shape = BATCH, HEADS, 24 + 2 * masked + first, 64  # of its own: PyTorch keeps a graph of cuDNN for each shape
    q, k, v = (drawn(*shape, dtype=torch.bfloat16) for _ in range(3))
    mask = drawn(1, 1, shape[2], shape[2], dtype=torch.bfloat16, wanted=False) if masked else None
    gradient = drawn(*shape, dtype=torch.bfloat16, wanted=False)
    layouts = [gradient, gradient.transpose(1, 2).contiguous().transpose(1, 2)]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):  # the latter in float64
        fused = fusion.fuse(lambda *operands: F.scaled_dot_product_attention(*operands) * 1, options={"strict": True})
        exact = torch.autograd.grad(
            F.scaled_dot_product_attention(q.double(), k.double(), v.double(), None if mask is None else mask.double()),
            (q, k, v),
            gradient.double(),
        )
        F.scaled_dot_product_attention(q, k, v, mask).backward(layouts[first])
        for layout in (layouts[1 - first], layouts[first]):
            ours = torch.autograd.grad(fused(q, k, v, mask), (q, k, v), layout)
            assert all((x - y).norm() < 0.01 * y.norm() for x, y in zip(ours, exact, strict=True))
    assert any("cudnn" in call.name for graph in fusion.report(fused).graphs for call in graph.externs)


PROGRAMS: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "convolution with channels last": (
        lambda x, w: F.conv2d((x * 2).contiguous(memory_format=torch.channels_last), w).relu(),
        ((2, 8, 9, 11), (16, 8, 3, 3)),
    ),
    "convolution of a transposed image": (
        lambda x, w: F.conv2d((x * 2).mT, w * 2, stride=2).cos(),
        ((2, 8, 9, 11), (16, 8, 3, 3)),
    ),
    "convolution of tokens in groups": (
        lambda x, w: F.conv1d((x + 1).transpose(1, 2), w, padding=1, groups=4).transpose(1, 2) * 2,
        ((2, 13, 8), (8, 2, 3)),
    ),
    "transposed convolution of a slice": (
        lambda x, w: F.conv_transpose2d((x * 2)[:, 1:, :, 1:], w, stride=2).sum((2, 3)),
        ((2, 9, 5, 7), (8, 4, 3, 3)),
    ),
    "product of transposed": (lambda x, y: (x * 2).mT @ (y + 1)[:, :, 1:], ((3, 14, 6), (3, 14, 5))),
    "product of expanded": (lambda x, y: (x * 2).expand(3, -1, -1) @ (y.cos()).mT, ((1, 7, 13), (3, 5, 13))),
    "product of a strided slice": (lambda x, y: (x * 2)[::2, 1::2] @ y.exp()[1:, :-1].mT, ((9, 14), (6, 8))),
    "sum and product": (lambda x, y, z: torch.addmm((z * 2).sum(0), x * 2, y.mT), ((7, 13), (5, 13), (3, 5))),
    "fourier transform": (lambda x: torch.fft.rfft((x * 2).mT, dim=1).abs(), ((3, 6, 8),)),
    "inverse": (lambda x, y: torch.linalg.solve((x * 0.1).mT + y.expand(5, 5), x * 2), ((2, 5, 5), (5, 1))),
    "sorted columns": (lambda x: (x * 2).mT.sort(1).values.cos(), ((3, 6, 8),)),
    "distances": (lambda x, y: torch.cdist((x * 2)[:, ::2], (y * 3).mT), ((2, 6, 8), (2, 8, 4))),
}


@pytest.mark.parametrize("numerics", ["default", "strict"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_others(name: str, numerics: str) -> None:
    """Under strict numerics products are the library's, too."""
    program, shapes = PROGRAMS[name]
    as_near_as_eager(program, *(drawn(*shape) for shape in shapes), numerics=numerics)
