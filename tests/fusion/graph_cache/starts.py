"""Compilations as a process starts them, and their notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import fusion
import fusion.compilation.compile
import fusion.compilation.graph_compiler
from fusion.backend import Backend
from fusion.inspect.explanation import Explanation
from fusion.options import Options


def started(
    function: Callable[..., object], *inputs: object, dynamic: bool | None = None, **options: object
) -> tuple[object, Explanation]:
    """Return the result and the report of a compilation, of which this process keeps no state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Backend(Options.read(None, {"strict": True, **options}))
    result = torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    if isinstance(result, Tensor) and result.requires_grad:
        result.sum().backward()
    return result, Explanation(tuple(backend.reports))


def fresh(tensor: Tensor) -> Tensor:
    """A copy in the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def run(
    function: Callable[..., object], given: Sequence[Tensor], **settings: object
) -> tuple[list[Tensor], list[str], list[tuple[int, ...]]]:
    """Results, changed inputs and gradients of a program that this process compiles anew, notes and strides."""
    inputs = [fresh(each) for each in given]
    torch._dynamo.reset()
    torch.manual_seed(0)
    dynamic = settings.pop("dynamic", None)
    backend = Backend(Options.read(None, {"strict": True, **settings}))
    results = torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    results = [results] if isinstance(results, Tensor) else list(results)
    loss = [result.sum() for result in results if result.requires_grad]
    if loss:
        torch.stack(loss).sum().backward()
    gradients = [each.grad for each in inputs if each.grad is not None]
    actual = [note for report in backend.reports for note in report.notes]
    values = [*results, *inputs, *gradients]
    return [value.detach() for value in values], actual, [value.stride() for value in values]


def notes(result: Explanation) -> list[str]:
    return [note for graph in result.graphs for note in graph.notes]


def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a compilation fail that AOTAutograd's trace leads to."""

    def fail(*args: object, **kwargs: object) -> object:
        raise AssertionError("traced again")

    monkeypatch.setattr(fusion.compilation.graph_compiler, "compile_graph", fail)


def no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> object:
        raise AssertionError("lowered or scheduled again")

    monkeypatch.setattr(fusion.compilation.compile, "schedule_graph", fail)
