"""Blocks within the inner bounds of a mask in memory: a body of their own, which does not read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fusion
from fusion.lowering.indexing import FloorDiv
from fusion.lowering.ir.expr import Expr, IndexValue, Op
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Kernel, Loop
from fusion.lowering.verify import verify_kernel
from fusion.schedule.chained import mask_bounds
from tests.codegen.c.kernels import TARGET
from tests.codegen.kernels.making import F32, F64, I32, assert_same, expected, load, param
from tests.codegen.kernels.masked import EACH, WALKS, given, masked
from tests.fusion.masks import added, masks

SIZES = (2, 450, 333)
PROGRAM_SIZES = (2, 700, 833)  # few blocks are computed with their scores in memory
GROUP = 64
NAMES = ("first", "end", "whole_first", "whole_end")
BODIES = re.compile(r"^( *)if \((whole.*)\) \{\n(.*?)^\1\} else \{\n(.*?)^\1\}\n", re.MULTILINE | re.DOTALL)


def bodies(text: str) -> tuple[str, str]:
    """The bodies of the one loop that has two: for whole blocks, and for others."""
    ((_, _, whole, other),) = BODIES.findall(text)
    return whole, other


# Kernels --------------------------------------------------------------------------------------------------------------


def with_bounds(walk: str) -> Kernel:
    """An attention kernel under flags in memory, with bounds for groups of the rows that a block shares."""
    kernel = masked(walk, EACH, SIZES, 40)
    (loop,) = (stmt for stmt in kernel.body if isinstance(stmt, Loop))
    (point,), (_, query, key) = loop.axes, WALKS[walk]
    row, rows = (query, SIZES[1]) if point == key else (key, SIZES[2])
    first, end, whole_first, whole_end = (load(name, FloorDiv(row, GROUP), I32) for name in NAMES)

    def between(least: Expr, past: Expr) -> Op:
        return op("and", op("ge", IndexValue(point, I32), least), op("lt", IndexValue(point, I32), past))

    assert loop.where is not None
    where = op("bounded", loop.where, between(first, end), between(whole_first, whole_end))
    body = tuple(replace(stmt, where=where) if stmt is loop else stmt for stmt in kernel.body)
    bounds = (param(name, I32, -(-rows // GROUP)) for name in NAMES)
    bounded = replace(kernel, params=(*bounds, *kernel.params), body=body)
    verify_kernel(bounded)
    return bounded


def ranges(seen: Tensor) -> list[Tensor]:
    """The outer and the inner bounds of each group of rows."""
    found = []
    for group in seen.split(GROUP):
        some, every = (torch.nonzero(flags).flatten().tolist() for flags in (group.any(0), group.all(0)))
        found.append([*(_ends(some) or (seen.shape[1], 0)), *(_ends(every) or (seen.shape[1], 0))])
    return [*torch.tensor(found, dtype=I32).T.contiguous()]


def _ends(points: list[int]) -> tuple[int, int] | None:
    return (points[0], points[-1] + 1) if points else None


@pytest.mark.parametrize("walk", WALKS)
def test_a_whole_block_does_not_read_the_mask(walk: str) -> None:
    kernel = with_bounds(walk)
    text = TARGET.emit(kernel)
    whole, other = bodies(text)
    assert not re.search(r"\beach\b|turned", whole) and re.search(r"\beach\b", other)
    scratch = set(re.findall(r"\*restrict (\w+) = ", text))
    only = {name for name in scratch if re.search(rf"\b{name}\b", whole) and not re.search(rf"\b{name}\b", other)}
    assert not only, "both bodies use the same tiles"


@pytest.mark.parametrize("walk", WALKS)
def test_numbers_under_bounds(walk: str) -> None:
    """Also where the mask of whole blocks is not as the bounds say: nothing reads it there."""
    kernel = with_bounds(walk)
    tensors = given(kernel, SIZES)
    at = {p.name: tensor for p, tensor in zip(kernel.params, tensors, strict=True)}
    seen = at["each"].copy_(masks(*SIZES[1:])["causal"])
    for name, bound in zip(NAMES, ranges(seen.T if walk == "dkv" else seen), strict=True):
        at[name].copy_(bound)
    want = expected(kernel, tensors)
    run = TARGET.build(kernel, TARGET.emit(kernel))
    run(*tensors)
    assert_same(kernel, tensors, want)
    results = [at[p.name] for p in kernel.params if p.written]
    before = [result.clone() for result in results]
    seen[384:, :64] = False  # in whole blocks: of at most 192 × 192
    run(*tensors)
    assert all(map(torch.equal, results, before))
    at["whole_end"].zero_()
    run(*tensors)
    assert not any(map(torch.equal, results, before))


def test_both_bodies_have_the_same_bits() -> None:
    """The sums of a row do not depend on the rows that share its block."""
    for walk in WALKS:
        kernel = with_bounds(walk)
        results = []
        for inner in (True, False):
            tensors = given(kernel, SIZES)
            at = {p.name: tensor for p, tensor in zip(kernel.params, tensors, strict=True)}
            seen = at["each"].copy_(masks(*SIZES[1:])["causal"])
            for name, bound in zip(NAMES, ranges(seen.T if walk == "dkv" else seen), strict=True):
                at[name].copy_(bound if inner or name != "whole_end" else torch.zeros_like(bound))
            TARGET.build(kernel, TARGET.emit(kernel))(*tensors)
            results.append([at[p.name] for p in kernel.params if p.written])
        assert all(map(torch.equal, *results))


# Programs -------------------------------------------------------------------------------------------------------------


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def selected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k) + mask.to(q.dtype)).softmax(-1) @ v


LEAST = torch.finfo(F32).min
FORMS: Mapping[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "flags": (selected, lambda mask: mask),
    "infinity": (biased, lambda mask: added(mask, F32, float("-inf"))),
    "least": (biased, lambda mask: added(mask, F32, LEAST)),
}


@pytest.mark.parametrize("kind", ["causal", "empty rows", "random"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_and_its_gradients(form: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that see no key, and of masks that are nowhere whole, too."""
    monkeypatch.setattr(mask_bounds, "_SHARE", float("inf"))  # masks of small programs get bounds, too
    program, of_flags = FORMS[form]
    mask = of_flags(masks(*PROGRAM_SIZES[1:])[kind])
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(PROGRAM_SIZES[0], n, 40, generator=generator)
        for n in (PROGRAM_SIZES[1], PROGRAM_SIZES[2], PROGRAM_SIZES[2])
    ]

    def results(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = run(*leaves, mask)
        return [out.detach(), *torch.autograd.grad((out * torch.linspace(-1, 2, 40, dtype=dtype)).sum(), leaves)]

    mine = results(fusion.fuse(program, options={"target": "c", "strict": True}), F32)
    for got, eager, exact in zip(mine, results(program, F32), results(program, F64), strict=True):
        known = ~exact.isnan()
        assert torch.equal(got.isnan(), ~known)
        assert bool((got - exact)[known].norm() <= 1.5 * (eager - exact)[known].norm() + 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_program_has_both_bodies(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_bounds, "_SHARE", float("inf"))
    program, of_flags = FORMS[form]
    mask = of_flags(masks(*PROGRAM_SIZES[1:])["causal"])
    inputs = [
        torch.randn(PROGRAM_SIZES[0], n, 40, requires_grad=True)
        for n in (PROGRAM_SIZES[1], PROGRAM_SIZES[2], PROGRAM_SIZES[2])
    ]
    explanation = fusion.explain(program, backward=True, options={"target": "c"})(*inputs, mask)
    attention = [kernel.source for kernel in explanation.kernels if "multiply_float(" in kernel.source]
    assert len(attention) >= 2
    for text in attention:
        whole, other = bodies(text)
        (name,) = {name for name, kind in re.findall(r"\*restrict (in\d+),  // (\w+)\[700, 833\]", text)}
        assert not re.search(rf"\b{name}\b", whole) and re.search(rf"\b{name}\b|\bturned", other)
