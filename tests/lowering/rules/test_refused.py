"""Calls that eager refuses but PyTorch's trace accepts stay eager's, which raises the error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion.lowering.interpret import run_program
from tests.lowering.lowered import lowered

REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "from 3 to -1": lambda x: torch.ops.aten.uniform(x, 3.0, -1.0),
    "wider than float32": lambda x: torch.ops.aten.uniform(x, -3e38, 3e38),
    "no integers": lambda x: torch.randint_like(x, 5, 5),
    "a probability of 2": lambda x: torch.bernoulli(x, 2.0),
    "dropped more than always": lambda x: torch.native_dropout(x, 2.0, True)[0],
    "probabilities that are integers": lambda x: torch.bernoulli(x.long()),
    "weights that are integers": lambda x: torch.multinomial(x.long() + 1, 2),
    "no choices": lambda x: torch.multinomial(x + 1, 0),
    "more choices than weights": lambda x: torch.multinomial(x + 1, 9),
    "a mask of bytes": lambda x: x.masked_scatter(x.byte(), x),
    "the largest of none": lambda x: x[:0].max(),
    "the smallest of none": lambda x: x[:0].min(),
    "a position behind the end": lambda x: x.select_scatter(x[0], 0, 8),
    "a position before the start": lambda x: x.select_scatter(x[0], 0, -9),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_eager_refuses_stay_calls(name: str) -> None:
    x = torch.ones(8)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        REFUSED[name](x)
    program = lowered(lambda x: REFUSED[name](x) + 1, x)
    with pytest.raises(type(expected.value)) as actual:
        run_program(program, [x])
    assert str(actual.value) == str(expected.value)
