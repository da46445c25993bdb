"""Programs that the passes change: reductions, products, masks, views, scatters, chunks, writes in place.

Each covers some passes, and is small: its numbers are computed twice for every pass that changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.fusion import attentions


@dataclass(frozen=True)
class Case:
    """A function, and a function that draws its inputs from a generator.

    Attributes:
        backward: go backward from the sum of the results to the floats among the inputs.
        dynamic: compile for symbolic sizes.
        options: of the compilation.
    """

    function: Callable[..., object]
    inputs: Callable[[Callable[..., Tensor]], tuple[object, ...]]
    backward: bool = False
    dynamic: bool | None = None
    options: Mapping[str, object] = field(default_factory=lambda: {"target": "triton"})


C = {"target": "c"}
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def of(*shapes: tuple[int, ...], dtype: torch.dtype = F64) -> Callable[[Callable[..., Tensor]], tuple[object, ...]]:
    """Normal numbers of these shapes."""
    return lambda normal: tuple(normal(*shape).to(dtype) for shape in shapes)


# Dynamo's graph -------------------------------------------------------------------------------------------------------


def region(x: Tensor) -> Tensor:
    layer = torch.compiler.nested_compile_region(lambda y: torch.tanh(y) * 2)
    return layer(layer(x))


def written_windows(x: Tensor) -> Tensor:
    y = x.clone()
    y.unfold(0, 2, 3).mul_(2)
    return y + 1


def kept_strides(x: Tensor, y: Tensor) -> Tensor:
    x.index_add_(0, torch.tensor([1, 0]), y)
    return x.t()[1:]


class Scaled(nn.Module):
    """A setting, which Dynamo passes as a number where sizes are symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.37

    def forward(self, x: Tensor) -> Tensor:
        return x * self.eps + 1


def resized(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear") * 2


def shifted_logits(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()[:, :-1].tanh().sum(-1)


def natively_attended(x: Tensor, *parameters: Tensor) -> Tensor:
    return torch._native_multi_head_attention(x, x, x, 4, 2, *parameters, need_weights=False)[0] + x


# The joint graph ------------------------------------------------------------------------------------------------------


def modified_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def alibi(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + (row - column) / (h + 1)

    result: Tensor = flex_attention(q, k, v, score_mod=alibi)
    return result


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2) * 3


def images(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, first, padding=1).relu(), second, padding=1) * 2


def windowed(x: Tensor, windows: Tensor) -> Tensor:
    """A convolution of few channels."""
    return F.conv2d(x, windows, stride=2, padding=1).sin()


def convolved(x: Tensor, windows: Tensor, bias: Tensor, pixels: Tensor) -> Tensor:
    """Convolutions of images with channels first, of windows and of pixels."""
    return F.conv2d(F.conv2d(x, windows, bias, padding=1).sin(), pixels)


def patched(x: Tensor, patches: Tensor, pixels: Tensor) -> Tensor:
    """Windows that do not overlap, and windows of one pixel of images with channels last."""
    return F.conv2d(F.conv2d(x, patches, stride=4).contiguous(memory_format=torch.channels_last).sin(), pixels)


def heard(x: Tensor, w: Tensor, places: Tensor) -> Tensor:
    given = F.conv1d(x, w, padding=1).transpose(1, 2) + places
    given = given + F.layer_norm(given, given.shape[-1:]).sin()
    return given + F.layer_norm(given, given.shape[-1:]).cos()


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The bias is computed for each element of the batch, and its heads are next to each other in memory."""
    expanded = bias.expand(len(q), *bias.shape).tanh().exp().lgamma().permute(0, 3, 1, 2)
    return torch.softmax(q @ k.mT + expanded, -1) @ v


def attended(x: Tensor, *layers: Tensor) -> Tensor:
    q, k, v = (F.linear(x, w, b) for w, b in zip(layers[::2], layers[1::2], strict=True))
    return (q @ k.t() * 1e-2).softmax(-1) @ v


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def gathered_maxima(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """Maxima of products with gathered keys, of which each row sees those before it."""
    seen = torch.arange(len(at)) < torch.arange(len(q))[:, None]
    return torch.where(seen, q @ k[at].t(), -float("inf")).amax(-1)


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda y: F.dropout(y.sin(), 0.5) * y, x, use_reentrant=False)


def checkpointed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)


def copied(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.0, training=True).clone() * x


def copied_before_a_change(x: Tensor, y: Tensor) -> Tensor:
    """The copy is read by backward, after the change."""
    old = y.clone()
    y.add_(1)
    return old * x


def copied_results(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors: who writes to one of them does not change the other."""
    y = x.sin()
    return y, y.clone()


def copied_for_its_layout(x: Tensor) -> Tensor:
    return x.t().sin().clone(memory_format=torch.contiguous_format).cos() * 2


def repeated(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Calls that look alike, and two results."""
    signs = torch.copysign(x, 0.0).exp() + torch.copysign(x, -0.0).exp()
    sums = torch.add(x, y).sin() * torch.add(x, y, alpha=3).sin()
    drawn = (x.exp() * torch.rand_like(x)).sin() * (x.exp() * torch.rand_like(x)).cos()
    return signs + sums + drawn, signs + sums + drawn


def own_softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def with_its_maximum(x: Tensor) -> Tensor:
    """The gradient through the maximum does not cancel."""
    m = x.amax(-1, keepdim=True)
    e = torch.exp(x - m)
    return e / e.sum(-1, keepdim=True) + m.sin()


def of_computed_maximum(x: Tensor) -> Tensor:
    return (x.sin() * 2).amax(-1)


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(x.sin(), 3, 2, 1)


def classified(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), t)


def normalised_rows(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    e = torch.exp(y - y.amax(-1, keepdim=True).detach())
    return e / e.sum(-1, keepdim=True)


def changed_after_use(x: Tensor, y: Tensor) -> Tensor:
    z = x * y.exp()
    y.mul_(2)
    return z


# The Program and its launches -----------------------------------------------------------------------------------------


def momentum(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.9).add_(y)
    y.sub_(x * 0.1)
    return x.sum()


def crossed(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.add_(y.flip(0))
    y.sub_(old.flip(0))


def other_layout(x: Tensor, y: Tensor) -> None:
    x.copy_((y.t() + 1).t())


def added_rows(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, i, y) + torch.zeros_like(x).index_add(0, i.flip(0), y * 2)


def positioned(rows: Tensor) -> Tensor:
    """The gradient of an embedding of positions: every row has an element of its own."""
    return torch.zeros(900, 8, dtype=rows.dtype).index_add(0, torch.arange(3, 803), rows)


def counted(bins: Tensor, x: Tensor) -> Tensor:
    """Many sources for each element."""
    return torch.zeros(500, dtype=x.dtype).index_add(0, bins, x)


def added_twice(x: Tensor, i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One of two scattered sums is also read by itself, and one begins with other numbers than 0."""
    first = torch.zeros_like(x).index_add(0, i, y)
    second = torch.zeros_like(x).index_add(0, i.flip(0), y * 2)
    return first + second - first, torch.zeros_like(x).index_add(0, i, y) + x.index_add(0, i.flip(0), y)


def added_to_computed(x: Tensor, i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The start of a scatter is read afterwards, and that of another one is not."""
    z = x.sin()
    return z.index_add(0, i, y) * z, x.cos().index_add(0, i, y)


def added_in_place(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    """What was there before is read afterwards."""
    old = x.clone()
    x.index_add_(0, i, y)
    return old * 2


def reversed_in_place(x: Tensor) -> None:
    """An element is read by another program than the one that writes it."""
    x.copy_(x.flip(0) + 1)


def copied_across(x: Tensor, y: Tensor) -> None:
    x.copy_(y.t() * 2)


def updated_and_returned(x: Tensor, y: Tensor) -> Tensor:
    z = x + y
    x.copy_(z)
    return z


def updated_and_multiplied(x: Tensor, w: Tensor) -> Tensor:
    """The library reads the numbers before the update."""
    old = x.clone()
    x.add_(1)
    return old @ w


def updated_bias(x: Tensor, b: Tensor) -> Tensor:
    b.add_(1)
    return x * b


def cached(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
    x.index_copy_(0, i, y)
    return y + 1


def relative(x: Tensor, w: Tensor) -> Tensor:
    distance = torch.arange(x.shape[1])[None] - torch.arange(x.shape[0])[:, None]
    return x + w[(distance.abs() * 3 + 1) % w.shape[0]]


def one_hot(i: Tensor, w: Tensor) -> Tensor:
    return (F.one_hot(i, 7).to(w.dtype) * w[:, None]).sum(-1)


def masked(x: Tensor, kept: Tensor) -> Tensor:
    return (x.masked_fill(~kept, float("-inf")).softmax(-1) @ x).nan_to_num(3.0)


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.gelu(x @ w) @ v


def gradients(scores: Tensor, scale: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    g = (torch.softmax(scores.float(), -1) * scale[:, None]).to(scores.dtype)
    return g @ w, g.t() @ x


def with_special(normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    x = normal(6, 6).to(F64)
    x[1, 2], x[2, 3], x[4] = float("nan"), float("inf"), -float("inf")
    return x, normal(6, 6) > 0


def scattered_rows(normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """So many rows that a row does not compare its number with each index."""
    return normal(600, 4).to(F64), torch.arange(600).square() % 600, normal(600, 4).to(F64)


def causal_mask(normal: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Heads of so many scores that they are not stored, with a causal mask in memory."""
    return *(normal(1, 1, 520, 4).to(F64) for _ in range(3)), torch.ones(520, 520, dtype=torch.bool).tril()


def gathered_keys(normal: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    return normal(1100, 4).to(F64), normal(50, 4).to(F64), torch.arange(256) % 50


HEADS = ((1, 1, 20, 4),) * 3

IMAGES = ((4, 16, 14, 14), (32, 16, 3, 3), (16, 32, 3, 3))

CASES: dict[str, Case] = {
    "region": Case(region, of((5, 7))),
    "written windows": Case(written_windows, of((12, 3))),
    "kept strides": Case(kept_strides, lambda normal: (normal(5, 4).double().t(), normal(2, 5).double()), dynamic=True),
    "setting": Case(Scaled(), of((5, 7)), dynamic=True),
    "resized": Case(resized, of((1, 2, 5, 6))),
    "unread rows": Case(shifted_logits, of((2, 5, 6), (40, 6)), options={"target": "triton", "workspace": 64}),
    "native attention": Case(natively_attended, of((2, 5, 4), (12, 4), (12,), (4, 4), (4,))),
    "modified attention": Case(modified_attention, of((1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4), dtype=F32)),
    "complex": Case(rotated, of((5, 8), (5, 4)), backward=True),
    "complex, inference": Case(rotated, of((5, 8), (5, 4))),
    "images": Case(images, of(*IMAGES, dtype=BF16), backward=True),
    "patches": Case(patched, of((2, 3, 9, 12), (5, 3, 4, 4), (2, 5, 1, 1), dtype=BF16), backward=True),
    "windows": Case(windowed, of((2, 3, 9, 12), (5, 3, 3, 3), dtype=BF16), backward=True),
    "windows, inference": Case(windowed, of((2, 3, 9, 12), (5, 3, 3, 3), dtype=BF16)),
    "patches, inference": Case(patched, of((2, 3, 9, 12), (5, 3, 4, 4), (2, 5, 1, 1), dtype=BF16)),
    "columns, inference": Case(convolved, of((2, 3, 9, 12), (5, 3, 3, 3), (5,), (4, 5, 1, 1))),
    "images, inference": Case(images, of(*IMAGES, dtype=BF16)),
    "relative": Case(relative, of((19, 23), (9,))),
    "sound": Case(heard, of((2, 3, 500), (32, 3, 3), (500, 32)), backward=True),
    "sound, inference": Case(heard, of((2, 3, 500), (32, 3, 3), (500, 32))),
    "checkpoint": Case(checkpointed, of((5, 7)), backward=True),
    "checkpointed attention": Case(checkpointed_attention, of(*HEADS), backward=True),
    "copy": Case(copied, of((5, 7)), backward=True),
    "copy before a change": Case(copied_before_a_change, lambda normal: (normal(5).double(), normal(5)), backward=True),
    "copied results": Case(copied_results, of((5, 7)), backward=True),
    "copy of another layout": Case(copied_for_its_layout, of((5, 7)), backward=True),
    "repeated": Case(repeated, of((5, 7), (5, 7)), backward=True),
    "softmax by hand": Case(own_softmax, of((5, 7)), backward=True),
    "softmax with its maximum": Case(with_its_maximum, of((5, 7)), backward=True),
    "computed maximum": Case(of_computed_maximum, of((5, 7)), backward=True),
    "pool": Case(pooled, of((1, 2, 9, 9)), backward=True),
    "loss": Case(
        classified,
        lambda normal: (normal(64, 300).double(), normal(101, 300).double(), torch.arange(64)),
        backward=True,
        options={"target": "triton", "workspace": 1 << 14},
    ),
    "chunks": Case(
        classified,
        lambda normal: (normal(70, 260), normal(303, 260), torch.arange(70)),
        options={"target": "c", "workspace": 1 << 15},
    ),
    "statistics": Case(normalised_rows, of((5, 70), (70,), dtype=BF16), backward=True),
    "changed after use": Case(changed_after_use, lambda normal: (normal(5).double(), normal(5)), backward=True),
    "attention": Case(attentions.plain, of((3, 2, 200, 4), (3, 2, 220, 4), (3, 2, 220, 4), dtype=F32), backward=True),
    "attention over layers": Case(attended, of((30, 20), *[(20, 20), (20,)] * 3, dtype=BF16), backward=True),
    "masked attention": Case(masked_attention, causal_mask),
    "biased attention": Case(biased_attention, of(*[(2, 4, 300, 16)] * 3, (300, 300, 4), dtype=F32)),
    "gathered maxima": Case(gathered_maxima, gathered_keys, options=C),
    "attention, widths": Case(attentions.plain, of(*HEADS), backward=True, dynamic=True),
    "attention, widths, inference": Case(attentions.plain, of(*HEADS), dynamic=True),
    "momentum": Case(momentum, of((40, 50), (40, 50))),
    "crossed": Case(crossed, of((40, 50), (40, 50))),
    "reversed": Case(reversed_in_place, of((40, 50))),
    "across": Case(copied_across, of((6, 6), (6, 6))),
    "returned update": Case(updated_and_returned, of((40, 50), (40, 50))),
    "multiplied update": Case(updated_and_multiplied, of((60, 70), (70, 80)), options=C),
    "bias update": Case(updated_bias, of((40, 50), (50,))),
    "other layout": Case(other_layout, of((6, 6), (6, 6))),
    "added rows": Case(added_rows, lambda n: (n(5, 3), torch.tensor([0, 4, 4, 1]), n(4, 3))),
    "rows at positions": Case(positioned, of((800, 8))),
    "crowded sums": Case(counted, lambda normal: (torch.arange(1 << 17) * 7 % 500, normal(1 << 17).double())),
    "sums of rows": Case(added_rows, scattered_rows, options=C),
    "sums of rows, read": Case(added_twice, scattered_rows, options=C),
    "sums into computed": Case(added_to_computed, scattered_rows, options=C),
    "sums in place": Case(added_in_place, scattered_rows, options=C),
    "cache": Case(cached, lambda n: (n(5, 3), torch.tensor([0, 4, 1]), n(3, 3)), options=C),
    "vector": Case(lambda w, x: (w @ x).relu(), of((30, 40), (40, 1), dtype=F32), options=C),
    "scattered operand": Case(
        lambda x, w: x.flatten(1) @ w,
        lambda n: (n(1024, 32, 6, 6).to(memory_format=torch.channels_last), n(1152, 48)),
    ),
    "transposed table": Case(lambda q, k, t: q @ k + t.permute(2, 0, 1), of((9, 2, 96, 8), (9, 2, 8, 96), (96, 96, 2))),
    "one-hot": Case(one_hot, lambda normal: (torch.tensor([6, 0, 3]), normal(3).double())),
    "powers": Case(lambda t: 1 - 0.999**t, lambda normal: (normal(9).double() * 3,)),
    "running sum": Case(lambda x: x.exp().cumsum(0), of((1 << 17,))),
    "long sum": Case(lambda x: (x - x.mean(-1, keepdim=True)).square().sum(-1), of((2, 1 << 17))),
    "norm": Case(lambda x, w: F.layer_norm(x, x.shape[-1:], w), of((9, 300), (300,), dtype=F32)),
    "masked": Case(masked, with_special),
    "views": Case(lambda x: (x[1:, ::2].t().flip(0) + x.t()[:3, 1:]).reshape(-1).sum(), of((6, 6))),
    "products": Case(gated, of((64, 96), (96, 64), (64, 32), dtype=BF16)),
    "odd rows": Case(gradients, lambda n: (n(512, 1001).to(BF16), n(512), n(1001, 256).to(BF16), n(512, 256).to(BF16))),
    "reused": Case(lambda x, w: torch.softmax((x @ w).sin(), -1), of((128, 64), (64, 512))),
}


def given(case: Case) -> list[object]:
    """The inputs of a case, always with the same numbers."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    inputs = case.inputs(normal)
    floats = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
    for tensor in floats if case.backward else ():
        tensor.requires_grad_(tensor.dtype is floats[0].dtype)
    return list(inputs)
