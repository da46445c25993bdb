"""Regions that `aot_compile` compiles, saved and loaded: in this process and in another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion import precompiled
from fusion.backend import fusion_backend
from fusion.lowering.errors import FusionError
from fusion.precompiled import Precompiled
from tests.fusion.graph_cache.starts import fresh, no_compilation

Given = Sequence[object]


def compiled(function: Callable[..., object], given: Given, **settings: object) -> Any:
    """The function, compiled ahead."""
    torch._dynamo.reset()
    made: Any = torch.compile(function, backend=fusion_backend, fullgraph=True, **settings)  # type: ignore[call-overload]
    return made.aot_compile((tuple(given), {}))


def loaded(made: Any, folder: Path) -> Any:
    """The function, saved and loaded in a process whose Dynamo knows nothing of it."""
    made.save_compiled_function(str(folder / "compiled"))
    torch._dynamo.reset()
    return torch.compiler.load_compiled_function(BytesIO((folder / "compiled").read_bytes()))


def norm_and_product(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.gelu(nn.functional.layer_norm(x, x.shape[-1:]) @ w)


def in_place(cache: Tensor, x: Tensor) -> Tensor:
    cache.mul_(0.5).add_(x)
    return cache.sum(-1) + 1


def with_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp(), x[1:]


PROGRAMS: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
    (norm_and_product, (torch.randn(5, 12), torch.randn(12, 7))),
    (norm_and_product, (torch.randn(5, 12, dtype=torch.float64).t(), torch.randn(5, 7, dtype=torch.float64))),
    (norm_and_product, (torch.randn(5, 12).bfloat16(), torch.randn(12, 7).bfloat16())),
    (in_place, (torch.randn(3, 5), torch.randn(3, 5))),
    (with_a_view, (torch.randn(4, 3),)),
]


@pytest.mark.parametrize(("function", "given"), PROGRAMS)
def test_a_saved_function_computes_the_same_without_scheduling(function, given, tmp_path, monkeypatch):
    made = compiled(function, given)
    expected_inputs, ours, theirs = ([x.clone() for x in given] for _ in range(3))
    expected = function(*expected_inputs)
    close = {"rtol": 0.05, "atol": 0.01} if given[0].dtype is torch.bfloat16 else {}
    torch.testing.assert_close(made(*ours), expected, **close)
    no_compilation(monkeypatch)
    again = loaded(made, tmp_path)
    torch.testing.assert_close(again(*theirs), expected, **close)
    torch.testing.assert_close([ours, theirs], [expected_inputs] * 2)
    (graph,) = fusion.report(again).graphs
    assert graph.kernels and not graph.externs
    assert fusion.report(made).kernels == graph.kernels


def test_gradients_of_a_saved_function(tmp_path, monkeypatch):
    given = torch.randn(5, 12, requires_grad=True), torch.randn(12, 7, requires_grad=True)
    made = compiled(norm_and_product, given)
    no_compilation(monkeypatch)
    again = loaded(made, tmp_path)
    gradients = []
    for function in (norm_and_product, made, again):
        leaves = [*map(fresh, given)]
        function(*leaves).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2)
    assert [graph.label for graph in fusion.report(again).graphs] == ["forward", "backward"]


def test_sizes_that_vary(tmp_path, monkeypatch):
    made = compiled(norm_and_product, (torch.randn(5, 12), torch.randn(12, 7)), dynamic=True)
    no_compilation(monkeypatch)
    again = loaded(made, tmp_path)
    for rows, inner, columns in ((5, 12, 7), (9, 31, 2), (2, 3, 4)):
        x, w = torch.randn(rows, inner), torch.randn(inner, columns)
        torch.testing.assert_close(again(x, w), norm_and_product(x, w))


def test_random_numbers_follow_the_seed(tmp_path):
    x = torch.ones(1000)
    made = compiled(lambda x: nn.functional.dropout(x, 0.3), (x,))
    again = loaded(made, tmp_path)
    results = []
    for function in (made, again):
        torch.manual_seed(3)
        results.append((function(x), function(x)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(*results[1]) and 0.6 < float((results[1][0] > 0).float().mean()) < 0.8


def test_autocast_of_the_compilation(tmp_path):
    x, w = torch.randn(5, 12), torch.randn(12, 7, requires_grad=True)

    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).relu()

    again = loaded(compiled(function, (x, w)), tmp_path)
    results = [each(x, w) for each in (function, again)]
    assert results[1].dtype is torch.bfloat16
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(result.float().square().sum(), w)[0] for result in results]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-2, atol=2e-2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 20), nn.Linear(20, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_module_with_its_parameters_of_the_moment(tmp_path, monkeypatch):
    module, x = Block(), torch.randn(3, 8)
    made = torch.compile(module, backend=fusion_backend, fullgraph=True).forward.aot_compile(((x,), {}))  # type: ignore[attr-defined]
    no_compilation(monkeypatch)
    again = loaded(made, tmp_path)
    other = Block()
    torch.testing.assert_close(again(other, x), module(x) * 0 + other(x))
    assert int(other.seen) == 2
    again(other, x).sum().backward()
    ours = [parameter.grad for parameter in other.parameters()]
    other.zero_grad()
    other(x).sum().backward()
    torch.testing.assert_close(ours, [parameter.grad for parameter in other.parameters()])


RUNS = """
import sys
import torch
import fusion
import fusion.codegen.c.build
import fusion.compilation.compile
import fusion.compilation.graph_compiler
from fusion.backend import fusion_backend

def f(x):
    return (x * 1.4375 + 0.3125).relu().sum(-1)

x = torch.ones(3, 40)
if len(sys.argv) > 2:
    made = torch.compile(f, backend=fusion_backend, fullgraph=True).aot_compile(((x,), {}))
    made.save_compiled_function(sys.argv[1])
else:
    def fail(*args, **kwargs):
        raise AssertionError("compiled again")

    fusion.codegen.c.build._compile = fusion.compilation.compile.schedule_graph = fail
    fusion.compilation.graph_compiler.compile_graph = fail
    with open(sys.argv[1], "rb") as file:
        made = torch.compiler.load_compiled_function(file)
print(made(x).tolist(), len(fusion.report(made).kernels))
"""


def test_a_new_process_on_an_empty_cache_compiles_nothing(tmp_path, monkeypatch):
    printed = []
    for number, words in enumerate((["save"], [])):
        monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / f"cache{number}"))
        command = [sys.executable, "-c", RUNS, str(tmp_path / "compiled"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed == ["[70.0, 70.0, 70.0] 1\n"] * 2


# Calls that a loaded region was not compiled for ---------------------------------------------------------------------


def test_other_inputs_are_refused_by_dynamos_guards(tmp_path):
    again = loaded(compiled(norm_and_product, (torch.randn(5, 12), torch.randn(12, 7))), tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        again(torch.randn(4, 12), torch.randn(12, 7))


def test_inputs_that_overlap_otherwise_are_refused(tmp_path):
    again = loaded(compiled(in_place, (torch.randn(3, 5), torch.randn(3, 5))), tmp_path)
    memory = torch.randn(20)
    with pytest.raises(FusionError, match=r"overlap otherwise(.|\n)*clone"):
        again(memory[:15].view(3, 5), memory[5:].view(3, 5))


def test_derivatives_of_gradients_are_refused(tmp_path):
    x = torch.randn(4, 3, requires_grad=True)
    again = loaded(compiled(lambda x: x.exp().sum(), (x,)), tmp_path)
    (gradient,) = torch.autograd.grad(again(x), x, create_graph=True)
    torch.testing.assert_close(gradient, x.exp())
    with pytest.raises(FusionError, match=r"gradients of gradients(.|\n)*compile the program"):
        gradient.sum().backward()


def test_forward_mode_is_refused(tmp_path):
    x = torch.randn(4, 3, requires_grad=True)
    again = loaded(compiled(lambda x: x.exp().sum(), (x,)), tmp_path)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(FusionError, match="forward-mode"):
        again(x)


def test_integers_of_more_than_64_bits_are_refused(tmp_path):
    x = torch.ones(3, dtype=torch.int64)
    again = loaded(compiled(lambda x, n: x + n * n, (x, 5), dynamic=True), tmp_path)
    assert again(x, 1 << 30).tolist() == [1 + (1 << 60)] * 3
    with pytest.raises(FusionError, match="more than 64 bits"):
        again(x, 1 << 40)


# Regions that are not saved -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"graph_cache": False}, "not kept in the graph cache"), ({"cudagraphs": True}, "recorded as a CUDA graph")],
)
def test_options_without_entries_compile_and_do_not_save(options, reason, tmp_path):
    x = torch.randn(4)
    made = compiled(lambda x: x.exp() + 1, (x,), options=options)
    torch.testing.assert_close(made(x), x.exp() + 1)
    with pytest.raises(FusionError, match=reason):
        loaded(made, tmp_path)


@torch.library.custom_op("fusion_tests::saved_twice", mutates_args=())
def saved_twice(x: Tensor) -> Tensor:
    return x * 2


saved_twice.register_fake(torch.empty_like)


def test_a_region_without_a_key_compiles_and_does_not_save(tmp_path):
    x = torch.randn(4)
    made = compiled(lambda x: torch.ops.fusion_tests.saved_twice.default(x.exp()) + 1, (x,))
    torch.testing.assert_close(made(x), x.exp() * 2 + 1)
    with pytest.raises(FusionError, match=r"cannot be saved: .*twice"):
        loaded(made, tmp_path)


def test_another_version_is_refused(monkeypatch):
    made = compiled(lambda x: x.exp() + 1, (torch.randn(4),))._artifacts.compiled_fn
    data = Precompiled.serialize_compile_artifacts(made)
    monkeypatch.setattr(precompiled, "compiler_version", lambda: "another")
    with pytest.raises(FusionError, match="another version of Fusion"):
        Precompiled.deserialize_compile_artifacts(data)


def test_damaged_data_are_refused():
    made = compiled(lambda x: x.exp() + 1, (torch.randn(4),))._artifacts.compiled_fn
    data = bytearray(Precompiled.serialize_compile_artifacts(made))
    data[len(data) // 2] ^= 1
    with pytest.raises(FusionError, match="cannot be read"):
        Precompiled.deserialize_compile_artifacts(bytes(data))
