"""Costly functions of differences and sums of indices are tables: the same numbers, errors and results in memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusion
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Map, Program
from fusion.lowering.verify import verify_program
from fusion.schedule.rewrites.index_tables import tabulate_differences
from fusion.schedule.rewrites.inline import inline_cheap_maps
from tests.lowering.lowered import lowered

ROWS, COLUMNS = 37, 50


def distances(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return torch.arange(columns)[None] - torch.arange(rows)[:, None]


def bucket(distance: Tensor) -> Tensor:
    """Return one of 32 buckets for a distance, logarithmic beyond 8."""
    far = 8 + (torch.log(distance.abs().float() / 8) / math.log(16) * 8).long()
    near = torch.where(distance.abs() < 8, distance.abs(), far.clamp(max=15))
    return (distance > 0).long() * 16 + near


TABULATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a bias in buckets": lambda x, w: x + w[bucket(distances())].permute(2, 0, 1),
    "in embeddings": lambda x, w: x + F.embedding(bucket(distances()), w).permute(2, 0, 1),
    "transposed": lambda x, w: x + w[bucket(-distances())].permute(2, 0, 1),
    "of a sum": lambda x, w: x + w[((distances() + 2 * torch.arange(ROWS)[:, None]) % 29)].permute(2, 0, 1),
    "clamped": lambda x, w: x * w[distances().clamp(-9, 9) + 9].permute(2, 0, 1),
    "reduced": lambda x, w: (x * torch.exp(-(distances().float() ** 2) / 50).sin()).sum(-1) + w[0, 0],
    "in a product": lambda x, w: torch.exp(-(distances().float() ** 2)).tanh() @ x.transpose(1, 2) + w[0, 0],
    "of a scale for each head": lambda x, w: x + torch.exp(distances() * w[:4].t()[:, :1, None].abs()).atan(),
}

KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a cheap one": lambda x, w: x + distances() * w[0, 0],
    "a condition": lambda x, w: x.masked_fill(distances() > 3, 0.0),
    "what hides scores": lambda x, w: (
        x + torch.where((distances() > 3) | (distances() % 5 == 2) | (distances() < -9), -torch.inf, 0.0)
    ),
    "of two indices": lambda x, w: x + torch.exp(torch.arange(ROWS)[:, None] * torch.arange(COLUMNS).float().sin()),
    "few rows": lambda x, w: x[:, :2] + w[bucket(distances(2))].permute(2, 0, 1),
    "of random numbers": lambda x, w: F.dropout(x, 0.5) + w[0, 0],
}


def given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, ROWS, COLUMNS, generator=generator), torch.randn(32, 4, generator=generator)


def tabulated(f: Callable[..., object], *args: Tensor) -> tuple[Program, Program]:
    before = inline_cheap_maps(lowered(f, *args))
    after = tabulate_differences(before)
    verify_program(after)
    return before, after


def tables(program: Program) -> list[Map]:
    return [node for node in program.nodes if isinstance(node, Map) and "_table" in node.out]


@pytest.mark.parametrize("name", TABULATED)
def test_costly_ones_are_tables(name: str) -> None:
    f, args = TABULATED[name], given()
    before, after = tabulated(f, *args)
    made = tables(after)
    assert made
    assert all(node.axes[-1].size == ROWS + COLUMNS - 1 for node in made)
    for ours, theirs in zip(run_program(after, args), run_program(before, args), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(run_program(after, args)[0], f(*args))


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    before, after = tabulated(KEPT[name], *given())
    assert after is before


def test_a_shared_part_is_visited_once() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.triu()
        for _ in range(64):  # 2^64 paths lead to `x`
            y = y * y + 0.1
        return y

    program = inline_cheap_maps(lowered(f, torch.randn(5, 5)))
    assert tabulate_differences(program) is program


def test_a_table_is_shared_and_a_result_is_stored_whole() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = w[bucket(distances())].permute(2, 0, 1)
        return x + bias, (x * 2 + bias).sum(-1), bias

    args = given()
    _, after = tabulated(f, *args)
    assert [tuple(axis.size for axis in node.axes) for node in tables(after)] == [(86,), (4, 86)]
    for ours, theirs in zip(run_program(after, args), f(*args), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ["reference", "c"])
def test_attention_reads_them(target: str, dtype: torch.dtype) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        bias = w[bucket(distances(q.shape[-2], k.shape[-2]))].permute(2, 0, 1)
        return torch.softmax(q @ k.mT + bias, -1) @ v

    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 4, n, 16, generator=generator) for n in (61, 83, 83))
    args = [x.to(dtype).requires_grad_() for x in (q, k, v, torch.randn(32, 4, generator=generator))]
    fused = fusion.fuse(f, options={"target": target, "strict": True})
    exact = [x.detach().double().requires_grad_() for x in args]

    def outcome(run: Callable[..., Tensor], values: list[Tensor]) -> list[Tensor]:
        result = run(*values)
        return [result.detach(), *torch.autograd.grad(result.square().sum(), values)]

    truth = outcome(f, exact)
    for ours, eager, right in zip(outcome(fused, args), outcome(f, args), truth, strict=True):
        error, theirs = ((each.double() - right).norm() / right.norm() for each in (ours, eager))
        assert error <= max(2 * theirs, 1e-6)


def test_sizes_may_be_symbolic() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return x + w[bucket(distances(x.shape[1], x.shape[2]))].permute(2, 0, 1)

    fused = fusion.fuse(f, dynamic=True, options={"target": "c", "strict": True})
    _, w = given()
    for rows, columns in ((37, 50), (64, 19), (3, 90), (101, 101)):
        x = torch.randn(4, rows, columns, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(fused(x, w), f(x, w))
    assert "_table" in str(fusion.report(fused))


def test_an_index_out_of_range_is_still_an_error() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return x + w[distances().abs()].permute(2, 0, 1)

    x, w = given()
    fused = fusion.fuse(f, options={"target": "c", "strict": True})
    torch.testing.assert_close(fused(x, w.repeat(2, 1)), f(x, w.repeat(2, 1)))
    with pytest.raises((IndexError, RuntimeError)):
        fused(x, w)
