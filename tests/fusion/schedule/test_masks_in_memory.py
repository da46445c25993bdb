"""Masks in memory on CPUs: loops run from the first block that one of their rows sees to the last."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor, fx

import fusion
import fusion.codegen.c.target
from fusion.attention import Choice, Chooser
from fusion.codegen.c.device import EPYC_AVX2
from fusion.codegen.c.target import CTarget
from tests.fusion.agreement import assert_as_eager
from tests.fusion.masks import added, masks

LEAST = torch.finfo(torch.float32).min
OPTIONS = {"target": "c", "strict": True}
ROWS, COLUMNS = 389, 453


def selected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / 4).masked_fill(~mask, -math.inf).softmax(-1) @ v


def summed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / 4 + mask).softmax(-1) @ v


def drawn(dtype: torch.dtype = torch.float32, rows: int = ROWS, columns: int = COLUMNS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, size, 16, generator=generator).to(dtype) for size in (rows, columns, columns)]


def as_eager(fused: Callable[..., Tensor], eager: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    assert_as_eager(fused(*inputs), eager(*inputs), eager(*exact))


def bounds(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    *folds, kernel = fusion.explain(function, options=OPTIONS)(*inputs).kernels
    assert folds and "_first" in kernel.source and "anywhere" in kernel.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flags(dtype: torch.dtype) -> None:
    fused, inputs = fusion.fuse(selected, options=OPTIONS), drawn(dtype)
    for kind, mask in masks(ROWS, COLUMNS).items():
        if kind not in ("nothing", "empty rows"):  # NaN in eager
            as_eager(fused, selected, [*inputs, mask])
    bounds(selected, *inputs, mask)


@pytest.mark.parametrize("hidden", [-math.inf, LEAST], ids=["infinity", "least"])
def test_numbers_that_are_added(hidden: float) -> None:
    """Rows that are hidden as a whole by the least number are a softmax of equal numbers, of infinities NaN."""
    fused, inputs = fusion.fuse(summed, options=OPTIONS), drawn()
    for mask in masks(ROWS, COLUMNS).values():
        for biased in (False, True):
            as_eager(fused, summed, [*inputs, added(mask, torch.float32, hidden, biased=biased)])
    bounds(summed, *inputs, added(mask, torch.float32, hidden))


@pytest.mark.parametrize("hidden", [-math.inf, LEAST], ids=["infinity", "least"])
def test_keys_and_values_that_are_hidden_are_not_read(hidden: float) -> None:
    inputs, mask = drawn(columns=576), masks(ROWS, 576)["window"]
    for operand in inputs[1:]:
        operand[:, 448:] = math.nan  # past the last key that a block of the last rows sees
    fused = fusion.fuse(summed, options=OPTIONS)
    assert fused(*inputs, added(mask, torch.float32, hidden)).isfinite().all()
    assert fusion.fuse(selected, options=OPTIONS)(*inputs, mask).isfinite().all()


@pytest.mark.parametrize("form", [None, -math.inf, LEAST], ids=["flags", "infinity", "least"])
def test_gradients(form: float | None) -> None:
    """The mask of a block of keys is copied with its queries as lanes; whole blocks have a body that reads none."""
    function = selected if form is None else summed
    fused = fusion.fuse(function, options=OPTIONS)
    upstream = torch.randn(2, ROWS, 16, generator=torch.Generator().manual_seed(1))

    def gradients(call: Callable[..., Tensor], inputs: list[Tensor], mask: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        grads = torch.autograd.grad(call(*leaves, mask), leaves, upstream.to(inputs[0].dtype))
        return tuple(grad.contiguous() for grad in grads)

    for kind in ("causal", "window", "first and window", "random", "everything", "sparse"):
        mask = masks(ROWS, COLUMNS)[kind]
        assert mask.any(1).all(), "no row of weights is NaN"
        mask = mask if form is None else added(mask, torch.float32, form)
        inputs = drawn()
        exact = gradients(function, [x.double() for x in inputs], mask.double() if form is not None else mask)
        got, eager = gradients(fused, inputs, mask), gradients(function, inputs, mask)
        for each in zip(got, eager, exact, strict=True):
            assert_as_eager(*each)
    sources = [kernel.source for kernel in fusion.report(fused).graphs[-1].kernels]
    assert any("turned0[" in source for source in sources)
    assert any("if (whole0) {" in source for source in sources)


def test_flags_are_expected_to_hide_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may be a bias that hides nothing: then all blocks are priced."""
    monkeypatch.setattr(fusion.codegen.c.target, "present", lambda: replace(EPYC_AVX2, threads=2))
    choices: list[Choice] = []
    chooser = Chooser(lambda device: CTarget())

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def backend(graph: fx.GraphModule, inputs: object) -> Callable[..., object]:
        choices.extend(chooser(graph))
        (results,) = graph.graph.output_node().args
        return lambda *_: results

    inputs = [torch.zeros(1, 8, 2048, 64, requires_grad=True) for _ in range(3)]
    flags = torch.ones(2048, 2048, dtype=torch.bool)
    for mask in (flags, flags.float()):
        torch._dynamo.reset()
        torch.compile(masked, backend=backend)(*inputs, mask)
    some, every = choices
    assert some.generated
    assert some.generated_us is not None and every.generated_us is not None
    assert some.generated_us == pytest.approx(0.75 * every.generated_us, rel=0.02)


def test_sizes_that_vary() -> None:
    fused = fusion.fuse(selected, options=OPTIONS, dynamic=True)
    for rows, columns in ((389, 453), (200, 700), (70, 131)):
        kinds = masks(rows, columns)
        for kind in ("causal", "window", "documents"):
            as_eager(fused, selected, [*drawn(rows=rows, columns=columns), kinds[kind]])


def test_heads_that_share_keys() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, ROWS, 16, generator=generator) for heads in (4, 2, 2))
    fused = fusion.fuse(grouped, options=OPTIONS)
    for kind in ("causal", "window", "first and window"):
        as_eager(fused, grouped, [q, k, v, masks(ROWS)[kind]])


def test_a_matrix_for_each_sequence() -> None:
    fused = fusion.fuse(summed, options=OPTIONS)
    kinds = masks(ROWS, COLUMNS)
    both = torch.stack([added(kinds[kind], torch.float32, LEAST) for kind in ("window", "everything")])
    as_eager(fused, summed, [*drawn(), both])


def test_a_mask_that_has_no_online_form_in_the_loop_is_computed_before() -> None:
    """Documents whose prefix is visible: with the least number, infinite scores of hidden points would count."""
    rows, columns = 193, 700

    def program(q: Tensor, k: Tensor, v: Tensor, length: Tensor, query: Tensor, key: Tensor) -> Tensor:
        i, j = torch.arange(rows).view(-1, 1), torch.arange(columns).view(1, -1)
        visible = (j < length.view(2, 1, 1, 1)) | (i + columns - rows >= j)
        mask = visible & (query.view(2, 1, rows, 1) == key.view(2, 1, 1, columns))
        return torch.where(mask, q @ k.mT, LEAST).softmax(-1) @ v

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, size, 40, generator=generator) for size in (rows, columns, columns))
    query, key = (torch.randint(0, 4, (2, size), generator=generator).sort().values for size in (rows, columns))
    given = torch.randint(0, columns + 1, (2,), generator=generator), query, key
    fused = fusion.fuse(program, options=OPTIONS)
    assert_as_eager(
        fused(q, k, v, *given), program(q, k, v, *given), program(q.double(), k.double(), v.double(), *given)
    )
    assert fusion.report(fused).kernels
