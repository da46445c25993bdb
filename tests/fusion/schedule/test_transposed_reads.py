"""Tensors that the epilogue of a product reads often, across their rows, are copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusion.inspect.examples import TARGET
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.expr import Load, loads
from fusion.lowering.ir.program import Map, Program
from fusion.lowering.verify import verify_program
from fusion.schedule.layouts.transposed_reads import copy_transposed_reads
from fusion.schedule.rewrites.inline import inline_cheap_maps
from tests.lowering.lowered import lowered

REQUESTS = replace(TARGET.capabilities, sector=32)
Function = Callable[..., object]


def copied(function: Function, *given: Tensor) -> tuple[Program, Program]:
    program = inline_cheap_maps(lowered(function, *given))
    result, _ = copy_transposed_reads(program, REQUESTS, ())
    verify_program(result)
    return program, result


def copies(program: Program) -> list[Map]:
    return [
        node
        for node in program.nodes
        if isinstance(node, Map) and isinstance(node.expr, Load) and node.out.endswith("_rows")
    ]


def biased(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    return q @ k + bias.permute(2, 0, 1)


def of_two_layers(q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    turned = bias.permute(2, 0, 1)
    return torch.tanh(q @ k + turned), torch.tanh(q @ k.sin() + turned)


def of_one_matrix(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """As many points as the bias has elements."""
    return q[:1] @ k[:1] + bias.permute(2, 0, 1)


def in_rows(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    return q @ k + bias.reshape(2, 96, 96)


def without_a_product(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    return (q.sum(-1)[..., None] + k.sum(-2)[..., None, :]) * bias.permute(2, 0, 1)


def given() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(9, 2, 96, 8), torch.randn(9, 2, 8, 96), torch.randn(96, 96, 2)


@pytest.mark.parametrize("function", [biased, of_two_layers])
def test_a_table_is_copied_once_for_all_readers(function: Function) -> None:
    tensors = given()
    before, after = copied(function, *tensors)
    (copy,) = copies(after)
    readers = [node for node in after.nodes if isinstance(node, Map) and node is not copy]
    assert not any(load.buffer == "bias" for node in readers for load in loads(node.expr))
    for ours, theirs in zip(run_program(after, tensors), run_program(before, tensors), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("function", [of_one_matrix, in_rows, without_a_product])
def test_other_reads_stay(function: Function) -> None:
    before, after = copied(function, *given())
    assert after is before


def test_devices_without_a_price_of_requests_have_no_copies() -> None:
    program = inline_cheap_maps(lowered(biased, *given()))
    assert copy_transposed_reads(program, TARGET.capabilities, ())[0] is program
