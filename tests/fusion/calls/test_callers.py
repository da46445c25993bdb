"""Reports of programs that share compiled code: each has its own calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import fusion


class Small(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).sin()


def compiled_in_place(module: torch.nn.Module) -> torch.nn.Module:
    module.compile(backend="fusion")
    return module


def compiled(program: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(program, backend="fusion")


def labels(program: Callable[..., object]) -> list[str]:
    return [graph.label for graph in fusion.report(program).graphs]


def bytes_read(program: Callable[..., object]) -> list[int]:
    return [kernel.bytes_read for kernel in fusion.report(program).kernels]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("how", [fusion.fuse, compiled, compiled_in_place])
def test_modules_of_a_class_report_their_own_calls(how: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    narrow, wide, twin, unused = (how(Small(width)) for width in (4, 8, 4, 4))
    with torch.no_grad():
        narrow(torch.ones(2, 4)), wide(torch.ones(2, 8))
        assert bytes_read(narrow) == [48] and bytes_read(wide) == [96] and not bytes_read(twin)
        twin(torch.ones(2, 4)), twin(torch.ones(2, 4))
    assert bytes_read(twin) == [48], "compiled for the first, and run"
    twin(torch.ones(2, 4)).sum().backward()
    assert labels(twin) == ["inference", "forward", "backward"] and labels(narrow) == ["inference"]
    assert "it was not called" in str(fusion.report(unused))


@pytest.mark.parametrize("how", [fusion.fuse, compiled])
def test_one_function_compiled_twice(how: Callable[[Callable[..., object]], Callable[..., Tensor]]) -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2 + 1

    first, second = how(doubled), how(doubled)
    first(torch.ones(3)), first(torch.ones(3))
    assert bytes_read(first) == [12] and not bytes_read(second)
    with torch.compiler.set_stance("eager_on_recompile"):  # in which PyTorch has other callbacks
        second(torch.ones(3))
    assert bytes_read(second) == [12]
    second(torch.ones(3, dtype=torch.float64))
    assert bytes_read(second) == [12, 24] and bytes_read(first) == [12]


def test_a_copy_has_its_own_report() -> None:
    fused = fusion.fuse(Small(4))
    fused(torch.ones(4))
    copied = copy.deepcopy(fused)
    assert labels(fused) and not labels(copied)
    copied(torch.ones(4))
    assert labels(copied)


def test_a_fused_module_between_the_graphs_of_another_program() -> None:
    inner = fusion.fuse(Small(4))

    @torch.compiler.disable
    def between(x: Tensor) -> Tensor:
        return inner(x)

    outer = fusion.fuse(lambda x: between(x.cos()) + 3)
    with torch.no_grad():
        outer(torch.ones(4))
    assert [kernel.name for kernel in fusion.report(inner).kernels] == ["mul_sin"]
    assert [kernel.name for kernel in fusion.report(outer).kernels] == ["cos", "add"]


def test_parts_around_what_cannot_be_traced_belong_to_each_caller() -> None:
    class Masked(Small):
        def forward(self, x: Tensor) -> Tensor:
            x = (x * self.factor).sin()
            x[x > 0] = x[x > 0] * 2
            return x.cos() + 1

    first, second = fusion.fuse(Masked(4)), fusion.fuse(Masked(4))
    with torch.no_grad():
        for fused in (first, second):
            fused(torch.ones(4))
    assert bytes_read(first) and bytes_read(first) == bytes_read(second)


def test_a_call_that_falls_back_is_in_the_report_of_the_program() -> None:
    def shifted(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    fused, x = fusion.fuse(shifted), torch.ones(8)
    fused(torch.ones(4), torch.ones(4))
    with pytest.warns(fusion.FusionWarning, match="overlap"):
        fused(x[:4], x[2:6])
    assert any("overlap" in graph.failure for graph in fusion.report(fused).graphs)


def test_calls_from_other_threads_count() -> None:
    first, second = fusion.fuse(Small(4)), fusion.fuse(Small(4))
    first(torch.ones(4))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(second, torch.ones(4)).result()
    assert labels(second) == labels(first)
