"""`flex_attention`: one kernel, whatever its functions of position are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fusion
from tests.fusion.agreement import assert_as_eager, error
from tests.fusion.schedule.test_attention import in_double

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

ROWS, KEYS, HEADS = 517, 533, 4
SLOPES = torch.linspace(0.01, 0.3, HEADS)
IDS = torch.arange(KEYS) // 90
LEARNED = torch.linspace(-1, 1, KEYS + ROWS)

Modification = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


def window(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return (row >= column) & (row - column < 100)


def document(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return IDS[row] == IDS[column]


def even_heads(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return (h % 2 == 0) & (column < 300)


def alibi(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return score + SLOPES[h].to(score.dtype) * (column - row)


def softcap(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def relative(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return score + LEARNED[column - row + ROWS].to(score.dtype)


CASES: dict[str, tuple[Modification | None, Modification | None]] = {
    "plain": (None, None),
    "causal": (None, causal),
    "window": (None, window),
    "documents": (None, document),
    "rows of half the heads": (None, even_heads),
    "alibi": (alibi, None),
    "softcap, causal": (softcap, causal),
    "relative, causal": (relative, causal),
}


def program(name: str, **options: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    score_mod, mask_mod = CASES[name]
    mask: BlockMask | None = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, 2, None, ROWS, KEYS, device="cpu")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, **options)

    return run


def operands(dtype: torch.dtype = torch.float32, heads: int = HEADS, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, HEADS, ROWS, 40), (batch, heads, KEYS, 40), (batch, heads, KEYS, 24))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def check(run: Callable[..., object], inputs: tuple[Tensor, ...], kernels: int = 1) -> None:
    options = {"target": "c", "strict": True}
    explanation = fusion.explain(run, options=options)(*inputs)
    assert len(explanation.kernels) == kernels and not explanation.externs, str(explanation)
    assert_as_eager(fusion.fuse(run, options=options)(*inputs), run(*inputs), run(*in_double(inputs)))


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_kernel(name: str) -> None:
    check(program(name), operands(batch=2))


def test_heads_and_batches_share_keys() -> None:
    check(program("causal", enable_gqa=True), operands(heads=2))


def test_16_bit_operands_have_wide_scores() -> None:
    check(program("softcap, causal"), operands(torch.bfloat16, batch=2))


def test_gpus_multiply_16_bit_operands_as_they_are() -> None:
    """Their scores are of widened operands, which is also what the kernel is predicted to cost."""

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / 64**0.5).masked_fill(torch.ones(1024, 1024, dtype=torch.bool).triu(1), float("-inf"))
        return torch.softmax(scores, -1) @ v

    mask = create_block_mask(causal, None, None, 1024, 1024, device="cpu")

    def modified(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    qkv = (torch.empty(2, 16, 1024, 64, dtype=torch.bfloat16),) * 3
    ours, theirs = (fusion.export_kernels(run, *qkv, arch="sm_90").explanation.kernels for run in (modified, written))
    assert len(ours) == len(theirs) == 1
    assert ours[0].predicted == theirs[0].predicted
    assert "float32[" not in ours[0].source


def test_logarithms_of_rows_without_scores_are_minus_infinity() -> None:
    run = program("rows of half the heads", return_lse=True)
    result, logarithm = fusion.fuse(run, options={"target": "c", "strict": True})(*operands(batch=2))
    assert not result[:, 1::2].any() and bool((logarithm[:, 1::2] == -torch.inf).all())
    check(run, operands(batch=2))


def test_scores_of_another_batch_reuse_the_kernel() -> None:
    run = fusion.fuse(program("alibi"), dynamic=True, options={"target": "c", "strict": True})
    for batch in (2, 3):
        q, k, v = (torch.randn(batch, HEADS, rows, 40) for rows in (ROWS, KEYS, KEYS))
        assert_as_eager(run(q, k, v), program("alibi")(q, k, v), program("alibi")(*in_double((q, k, v))))
    (graph,) = fusion.report(run).graphs
    assert len(graph.kernels) == 1 and not graph.externs


def test_blocks_without_scores_that_count_are_skipped() -> None:
    """A window of 100 keys of 533 makes the loop shorter: its bounds depend on the rows."""
    explained = fusion.explain(program("window"), options={"target": "reference", "strict": True})(*operands(batch=2))
    (kernel,) = explained.kernels
    assert "loop r0 where" in kernel.source


@pytest.mark.parametrize("name", ["causal", "softcap, causal", "rows of half the heads"])
def test_gradients_are_those_of_a_softmax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses backward on CPUs, where it has no kernel; ours are derived from the decomposition."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *operands: None)
    score_mod, mask_mod = CASES[name]
    assert mask_mod is not None
    attend = program(name, return_lse=True, scale=0.2)

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT * 0.2
        scores = scores if score_mod is None else score_mod(scores, *[scores] * 4)
        kept = mask_mod(None, torch.arange(HEADS)[:, None, None], torch.arange(ROWS)[:, None], torch.arange(KEYS))
        scores = scores.masked_fill(~kept, -torch.inf)
        return torch._safe_softmax(scores, -1) @ v, scores.logsumexp(-1)

    def gradients(function: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        result, logarithm = function(*leaves)
        total = result.sin().sum() + (0 if mask_mod is even_heads else logarithm.cos().sum())  # -inf has no gradient
        return torch.autograd.grad(total, leaves)

    inputs = operands(batch=2)
    fused = fusion.fuse(attend, options={"target": "c", "strict": True})
    got, eager, exact = gradients(fused, inputs), gradients(by_hand, inputs), gradients(by_hand, in_double(inputs))
    for mine, theirs, true in zip(got, eager, exact, strict=True):
        assert error(mine, true) <= 2 * error(theirs, true)
