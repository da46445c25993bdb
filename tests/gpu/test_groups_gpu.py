"""Attention in which one warp fetches and two groups compute, on a device: masks, layouts, heads, fifty times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import fusion
from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.forms.warp_specialised import WarpSpecialisedConfig
from tests.codegen.triton.test_groups import TAKEN
from tests.fusion import attentions
from tests.fusion.attentions import positions, scores
from tests.gpu.launched import check

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Several heads of queries share keys and values."""
    share = q.shape[1] // k.shape[1]
    return attentions.causal(q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1))


def nowhere(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows that are masked out completely, as far as a finite number does that."""
    s = scores(q, k)
    i, j = positions(s)
    return torch.softmax(s.masked_fill((j <= i) | (i % 3 == 0), -1e4), -1) @ v


def no_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The first rows see no key."""
    s = scores(q, k)
    i, j = positions(s)
    return torch.nan_to_num(torch.softmax(s.masked_fill(j > i - 200, float("-inf")), -1) @ v, 7.0)


def rows_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(batch, rows, heads, width) in memory"""
    return attentions.causal(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)


def packed(qkv: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values side by side"""
    return attentions.causal(*(tensor.transpose(1, 2) for tensor in qkv.unbind(2))).transpose(1, 2)


def keys_turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k * 0.1, -1) @ v


HEADS = (2, 8, 1024, 128)
NARROW = (2, 8, 1024, 64)
PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype, float, tuple[tuple[int, ...], ...]]] = {
    "plain": (attentions.plain, BF16, 1.0, (HEADS,) * 3),
    "halves, narrow": (attentions.causal, F16, 1.0, (NARROW,) * 3),
    "large scores": (attentions.causal, BF16, 6.0, (HEADS,) * 3),
    "window": (attentions.sliding_window, BF16, 1.0, (HEADS,) * 3),
    "prefix": (attentions.prefix, BF16, 1.0, (NARROW,) * 3),
    "softcap, slopes": (attentions.alibi_softcap, BF16, 1.0, (HEADS,) * 3),
    "grouped": (grouped, BF16, 1.0, (HEADS, (2, 2, 1024, 128), (2, 2, 1024, 128))),
    "cross": (attentions.plain, BF16, 1.0, (HEADS, (2, 8, 640, 128), (2, 8, 640, 128))),
    "widths differ": (attentions.causal, BF16, 1.0, (NARROW, NARROW, HEADS)),
    "widths differ otherwise": (attentions.causal, BF16, 1.0, (HEADS, HEADS, NARROW)),
    "rows first": (rows_first, BF16, 1.0, ((2, 1024, 8, 128),) * 3),
    "packed": (packed, BF16, 1.0, ((2, 1024, 3, 8, 64),)),
    "keys turned": (keys_turned, BF16, 1.0, (HEADS, (2, 8, 128, 1024), HEADS)),
    "odd rows": (attentions.causal, BF16, 1.0, ((2, 8, 1337, 128),) * 3),
    "odd rows, narrow": (attentions.plain, BF16, 1.0, ((2, 8, 1337, 64),) * 3),
    "odd cross": (attentions.plain, BF16, 6.0, (HEADS, (2, 8, 1100, 128), (2, 8, 1100, 128))),
    "odd widths": (attentions.causal, F16, 1.0, ((2, 8, 1100, 96), (2, 8, 1100, 96), (2, 8, 1100, 72))),
    "wide": (attentions.causal, BF16, 1.0, ((2, 8, 1024, 256),) * 3),
    "wide, odd": (attentions.alibi_softcap, BF16, 1.0, ((2, 8, 1100, 200),) * 3),
    "wide keys": (attentions.causal, BF16, 1.0, ((2, 8, 1024, 192), (2, 8, 1024, 192), (2, 8, 1024, 128))),
    "wide values": (attentions.causal, BF16, 1.0, (HEADS, HEADS, (2, 8, 1024, 256))),
    "least number": (attentions.least_number, BF16, 1.0, (HEADS,) * 3),
    "least number, added": (attentions.least_number_added, BF16, 1.0, (NARROW,) * 3),
    "finite masks": (nowhere, BF16, 1.0, (HEADS,) * 3),
    "no keys": (no_keys, BF16, 1.0, (HEADS,) * 3),
}


@pytest.mark.parametrize("name", TAKEN)
def test_kernels_in_every_form(name: str) -> None:
    kernel = TAKEN[name]
    configs = TritonTarget().configs(kernel)
    in_groups = [config for config in configs if isinstance(config, WarpSpecialisedConfig)]
    for config in dict.fromkeys((configs[0], *in_groups)):
        check(kernel, config)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_right_each_time(name: str) -> None:
    program, dtype, size, shapes = PROGRAMS[name]
    torch.manual_seed(0)
    given = [torch.randn(shape, device="cuda").mul(size).to(dtype) for shape in shapes]
    fused = fusion.fuse(program, options={"strict": True})
    got, eager, exact = fused(*given), program(*given), program(*(tensor.double() for tensor in given))

    def error(result: torch.Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    assert error(got) <= 2 * error(eager) + 1e-6
    assert got.stride() == eager.stride() and got.dtype is eager.dtype
    for _ in range(50):
        assert torch.equal(fused(*given), got)


@pytest.mark.parametrize("program", [attentions.plain, attentions.causal])
def test_lengths_that_vary(program: Callable[..., torch.Tensor]) -> None:
    """One compilation, for lengths that end within a block of a group, after it, and one row into the next."""
    fused = fusion.fuse(program, options={"strict": True})
    for length in (1300, 1024, 1216, 1345, 2048, 129):
        given = [torch.randn(4, 8, length, 64, device="cuda").to(BF16) for _ in range(3)]
        for tensor in given:
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        exact = program(*(tensor.double() for tensor in given))
        got, eager = fused(*given), program(*given)
        assert (got.double() - exact).norm() <= 2 * (eager.double() - exact).norm() + 1e-6
