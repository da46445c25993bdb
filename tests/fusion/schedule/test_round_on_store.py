"""Values that are only read rounded are stored rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Map, Program, Reduce, reads
from fusion.lowering.verify import verify_program
from fusion.schedule.layouts.round_on_store import round_on_store
from fusion.schedule.rewrites.inline import inline_cheap_maps
from tests.lowering.lowered import lowered

BF16, F16 = torch.bfloat16, torch.float16
GIVEN = [torch.randn(24, 16)]


def read_rounded(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.exp(x.erf())  # too much to be computed again by both
    return hidden.to(BF16).float().sum(0), hidden.to(BF16).float().sum(1)


def read_wide(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.exp(x.erf())
    return hidden.to(BF16).float().sum(0), hidden.sum(1)


def read_as_either(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.exp(x.erf())
    return hidden.to(BF16).float().sum(0), hidden.to(F16).float().sum(1)


def returned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.exp(x.erf())
    return hidden.to(BF16).float().sum(0), hidden


def before(function: Callable[..., object]) -> Program:
    return inline_cheap_maps(lowered(function, *GIVEN))


def maps(program: Program) -> dict[str, torch.dtype]:
    return {node.out: program.buffers[node.out].dtype for node in program.nodes if isinstance(node, Map)}


def test_a_value_that_all_readers_round_is_stored_rounded() -> None:
    program = before(read_rounded)
    narrow = round_on_store(program)
    assert maps(program) == {"erf": torch.float32, "exp": torch.float32}
    assert maps(narrow) == {"erf": torch.float32, "exp": BF16}
    verify_program(narrow)
    for ours, theirs in zip(run_program(narrow, GIVEN), run_program(program, GIVEN), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("function", [read_wide, read_as_either, returned])
def test_a_value_with_an_unrounded_reader_stays(function: Callable[..., object]) -> None:
    program = before(function)
    assert torch.float32 in maps(program).values()
    assert round_on_store(program) is program


def read_beside_a_copy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.exp(x.erf())
    copy = hidden.to(BF16)
    return copy, copy.float().sum(0), hidden.to(BF16).float().sum(1)


def test_readers_read_the_rounded_copy_that_the_program_has() -> None:
    program = before(read_beside_a_copy)
    narrow = round_on_store(program)
    assert maps(narrow) == {"erf": torch.float32, "exp": torch.float32, "_to_copy": BF16}
    assert [reads(node) for node in narrow.nodes if isinstance(node, Reduce)] == [("_to_copy",), ("_to_copy",)]
    verify_program(narrow)
    for ours, theirs in zip(run_program(narrow, GIVEN), run_program(program, GIVEN), strict=True):
        assert torch.equal(ours, theirs)
