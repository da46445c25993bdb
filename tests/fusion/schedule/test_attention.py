"""Hand-written attention becomes one kernel with one loop, forward and backward, with eager's values."""

from __future__ import annotations

import re

import pytest
import torch

import fusion
from tests.fusion.agreement import assert_as_eager, error
from tests.fusion.attentions import ATTENTIONS, Attention

IDS = [case.name for case in ATTENTIONS]


def in_double(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.double() if x.dtype.is_floating_point else x for x in inputs)


FORWARD = [pytest.param(case, marks=pytest.mark.slow) if case.name == "width 256" else case for case in ATTENTIONS]
"""Wide heads take a C compiler long; their backward is tested with the others."""


@pytest.mark.parametrize("case", FORWARD, ids=IDS)
def test_forward(case: Attention) -> None:
    inputs = case.inputs()
    explanation = fusion.explain(case.function, options={"target": "reference", "strict": True})(*inputs)
    walks = [kernel for kernel in explanation.kernels if " dot over " in kernel.source]  # others may merge its parts
    assert len(walks) == 1 and len(explanation.kernels) <= 3 and not explanation.externs, str(explanation)
    fused = fusion.fuse(case.function, options={"target": "c", "strict": True})
    assert_as_eager(fused(*inputs), case.function(*inputs), case.function(*in_double(inputs)))


@pytest.mark.parametrize("name", ["plain", "causal", "masked rows", "alibi, softcap"])
def test_large_scores(name: str) -> None:
    """Scores around ±1e4, far beyond the range of exp."""
    case = next(case for case in ATTENTIONS if case.name == name)
    inputs = case.inputs(size=100.0)
    fused = fusion.fuse(case.function, options={"target": "c", "strict": True})
    assert_as_eager(fused(*inputs), case.function(*inputs), case.function(*in_double(inputs)))


def gradients(function: object, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Of a weighted sum of the (first) result, with respect to q, k and v."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    result = function(*leaves, *inputs[3:])
    result = result[0] if isinstance(result, tuple) else result
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).to(result.dtype)
    result.backward(weights)
    return [x.grad for x in leaves]


@pytest.mark.parametrize("case", [c for c in ATTENTIONS if c.differentiable], ids=lambda case: case.name)
def test_backward(case: Attention) -> None:
    inputs = case.inputs()
    fused = fusion.fuse(case.function, options={"target": "c", "strict": True})
    got, eager, exact = (
        gradients(f, x) for f, x in ((fused, inputs), (case.function, inputs), (case.function, in_double(inputs)))
    )
    for mine, theirs, true in zip(got, eager, exact, strict=True):
        assert error(mine, true) <= 2 * error(theirs, true) + 1e-6 * float(true.abs().max())


@pytest.mark.parametrize(
    "name",
    ["plain", "causal", "grouped", "documents", "by hand", "normalised last", "cross", "width 256"],
)
def test_nothing_of_queries_by_keys_is_saved(name: str) -> None:
    """Forward saves numbers per row for backward, and backward recomputes the tiles."""
    case = next(case for case in ATTENTIONS if case.name == name)
    inputs = case.inputs()
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    sizes: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fusion.fuse(case.function, options={"target": "c", "strict": True})(*leaves, *inputs[3:])
    assert sizes and max(sizes) < case.queries[2] * case.keys[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["by hand", "normalised last"])
def test_backward_of_large_16_bit_scores(name: str, dtype: torch.dtype) -> None:
    """Row statistics from forward agree with the row that backward recomputes, in a kernel or by the library."""
    case = next(case for case in ATTENTIONS if case.name == name)
    inputs = case.inputs(dtype, size=5.0)
    fused = fusion.fuse(case.function, options={"target": "c", "strict": True})
    got, eager, exact = (
        gradients(f, x) for f, x in ((fused, inputs), (case.function, inputs), (case.function, in_double(inputs)))
    )
    for mine, theirs, true in zip(got, eager, exact, strict=True):
        assert error(mine, true) <= 2 * error(theirs, true)


def test_dropout_is_drawn_in_the_loop() -> None:
    """Its mask has the same numbers again under the same seed, and others under another seed."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.softmax(q @ k.mT / 8, -1), 0.3) @ v

    inputs = tuple(torch.randn(1, 2, 530, 64) for _ in range(3))
    fused = fusion.fuse(attend, options={"target": "c", "strict": True})
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(fused(*inputs))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    mean = torch.stack([fused(*inputs) for _ in range(60)]).mean(0)
    exact = torch.softmax(inputs[0] @ inputs[1].mT / 8, -1) @ inputs[2]
    assert float((mean - exact).abs().mean()) < 0.2 * float((results[0] - exact).abs().mean())


def test_returned_weights_are_stored() -> None:
    """The stored probabilities are right, and the result is the same."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(q @ k.mT / 8, -1)
        return weights @ v, weights

    inputs = tuple(torch.randn(1, 2, 530, 64) for _ in range(3))
    fused = fusion.fuse(attend, options={"target": "c", "strict": True})
    assert_as_eager(fused(*inputs), attend(*inputs), attend(*in_double(inputs)))


def test_a_mask_of_vectors_is_computed_where_it_is_read() -> None:
    """The gradients of attention over documents read the ids, not a mask of queries × keys that one of them wrote."""

    def sums(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        same = ids[:, None] == ids
        return torch.where(same, x, 0.0).sum(1), torch.where(same, y, 1.0).prod(0)

    inputs = (torch.randn(300, 300), torch.randn(300, 300), torch.arange(300) // 70)
    explanation = fusion.explain(sums, options={"target": "reference", "strict": True})(*inputs)
    assert not any("bool[300, 300] written" in kernel.source for kernel in explanation.kernels), str(explanation)
    assert_as_eager(fusion.fuse(sums, options={"target": "c"})(*inputs), sums(*inputs), sums(*in_double(inputs)))


LENGTH = 450
"""Rows and keys of more than two blocks of a kernel in C."""


def softmax_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT / 4 + mask, -1) @ v


def test_blocks_that_an_added_mask_hides_are_skipped() -> None:
    q, k, v = (torch.randn(2, LENGTH, 16) for _ in range(3))
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf"))
    mask[7] = float("-inf")  # NaN in eager
    *_, kernel = fusion.explain(softmax_of, options={"target": "c"})(q, k, v, mask).kernels
    assert re.search(r"anywhere0\)\) continue;", kernel.source)
    expected = softmax_of(*in_double((q, k, v, mask)))
    assert_as_eager(
        fusion.fuse(softmax_of, options={"target": "c"})(q, k, v, mask), softmax_of(q, k, v, mask), expected
    )
    mask[300, 449], mask[301, 2] = 1.0, float("nan")  # one point of a block that is hidden otherwise
    expected = softmax_of(*in_double((q, k, v, mask)))
    assert_as_eager(
        fusion.fuse(softmax_of, options={"target": "c"})(q, k, v, mask), softmax_of(q, k, v, mask), expected
    )


def test_weights_take_the_place_of_scores_that_nothing_reads_again() -> None:
    def entropies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k.mT / 4
        weights = torch.softmax(scores, -1)
        return weights @ v, (weights * scores).sum(-1)

    inputs = tuple(torch.randn(2, LENGTH, 16) for _ in range(3))
    for function, tiles in ((lambda q, k, v: entropies(q, k, v)[0], 1), (entropies, 2)):
        (kernel,) = fusion.explain(function, options={"target": "c"})(*inputs).kernels
        held = [line for line in kernel.source.splitlines() if "_all = aligned_alloc" in line]
        scratch = [int(line.split("threads*((")[1].split("*")[0]) for line in held]
        assert sum(size >= 100 * 100 for size in scratch) == tiles
        ours = fusion.fuse(function, options={"target": "c"})(*inputs)
        assert_as_eager(ours, function(*inputs), function(*in_double(inputs)))
