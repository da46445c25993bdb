"""Every fallback to eager is visible: in the report, as a warning, and under `strict` as an exception."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo import exc

import fusion
import fusion.compilation.graph_compiler
import fusion.stages
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.target import Launcher, OnRefusedLaunch
from fusion.codegen.targets import TARGETS
from fusion.lowering.errors import BuildError, Unsupported
from fusion.lowering.ir.kernel import Kernel

X = torch.linspace(-1, 2, 5)


def broken(*args: object, **kwargs: object) -> None:
    raise RuntimeError("a failure in a program with a break")


# Refusals of AOTAutograd ----------------------------------------------------------------------------------------------


def filled(x: Tensor, value: Tensor) -> Tensor:
    """The gradient of the value needs the number of distinct indices: a data-dependent size."""
    return torch.index_fill(x * 3, 0, torch.tensor([0, 3, 3]), value)


REFUSED = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="this release traces it, and it is called: test_results.py"
)


@REFUSED
def test_a_gradient_of_unknown_size_is_reported():
    x, value = X.clone().requires_grad_(), torch.tensor(2.0, requires_grad=True)
    fused = fusion.fuse(filled)

    def step(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        result = call(x, value)
        return result, *torch.autograd.grad(result, (x, value), torch.arange(5.0))

    with pytest.warns(fusion.FusionWarning, match="_unique"):  # releases differ in when they meet the gradient
        got = step(fused)
    for ours, theirs in zip(got, step(filled), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert any("_unique" in extern.reason for extern in fusion.report(fused).externs)


@REFUSED
def test_a_gradient_of_unknown_size_is_raised_under_strict():
    fused = fusion.fuse(filled, options={"strict": True})
    with pytest.raises(Exception, match=r"_unique[\s\S]*test_fallbacks\.py:\d+"):
        fused(X.clone().requires_grad_(), torch.tensor(2.0, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("kind", [exc.Unsupported, exc.TorchRuntimeError, exc.InternalTorchDynamoError])
def test_exceptions_of_dynamo_inside_of_the_backend(kind: type[Exception], monkeypatch: pytest.MonkeyPatch):
    """Raised by a backend, some of them would have Dynamo break the graph and go on eagerly."""

    def refuse(*args: object) -> None:
        raise kind("no such thing")

    monkeypatch.setattr(fusion.stages, "share_seeds", refuse)
    x = X.clone().requires_grad_()
    with pytest.raises(Exception, match=r"no such thing[\s\S]*test_fallbacks\.py:\d+"):
        fusion.fuse(lambda x: x.exp() + 1, options={"strict": True})(x)
    fused = fusion.fuse(lambda x: x.exp() + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusion.FusionWarning)
        torch.testing.assert_close(fused(x), x.exp() + 1)
    assert kind.__name__ in fusion.report(fused).graphs[-1].failure  # earlier ones are of the same code


def test_a_refusal_has_lines_and_a_hint(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise Unsupported("no such thing", hint="take another")

    monkeypatch.setattr(fusion.stages, "share_seeds", refuse)
    x = X.clone().requires_grad_()
    with pytest.raises(Exception, match=r"no such thing\n  at: .*test_fallbacks\.py:\d+\)\n  hint: take another"):
        fusion.fuse(lambda x: x.exp() + 1, options={"strict": True})(x)
    fused = fusion.fuse(lambda x: x.exp() + 1)
    with pytest.warns(fusion.FusionWarning, match="hint: take another"):
        fused(x)
    graph = fusion.report(fused).graphs[-1]
    assert graph.externs and all(call.origin.line.startswith("test_fallbacks.py:") for call in graph.externs)


def test_inputs_that_overlap_otherwise():
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y + 1

    lax, strict = fusion.fuse(f), fusion.fuse(f, options={"strict": True})
    for fused in (lax, strict):
        fused(X.clone(), X.clone())
    memory = torch.arange(8.0)
    with pytest.warns(fusion.FusionWarning, match="overlap"):
        got = lax(memory[:5], memory[3:])
    torch.testing.assert_close(got, torch.tensor([7.0, 9.0, 6.0, 7.0, 8.0]))
    lax(memory[:5], memory[3:])
    assert [("overlap" in graph.failure) for graph in fusion.report(lax).graphs] == [False, True]
    before = memory.clone()
    with pytest.raises(fusion.FusionError, match=r"overlap[\s\S]*test_fallbacks\.py:\d+"):
        strict(memory[:5], memory[3:])
    assert torch.equal(memory, before)


# Refusals of a target ------------------------------------------------------------------------------------------------


class Late(ReferenceTarget):
    """A target that builds every kernel, and refuses at the launch those on rows of 7."""

    def build(self, kernel: Kernel, source: str) -> Launcher:
        evaluate = super().build(kernel, source)

        def launcher(refused: OnRefusedLaunch | None = None) -> Launcher:
            def launch(*args: Tensor | int) -> None:
                if not any(isinstance(arg, Tensor) and arg.shape[-1:] == (7,) for arg in args):
                    return evaluate(*args)
                refusal = BuildError(f"{kernel.name} needs more shared memory than there is")
                if refused is None:
                    raise refusal
                return refused(refusal, args)

            launch.or_else = launcher  # type: ignore[attr-defined]
            return launch

        return launcher()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(TARGETS, "late", lambda arch, numerics: Late(numerics))
    return "late"


def test_the_cause_of_slow_launches_is_reported(monkeypatch: pytest.MonkeyPatch):
    class Lacking(ReferenceTarget):
        def missing_tools(self) -> str:
            return "no compiler"

    monkeypatch.setitem(TARGETS, "lacking", lambda arch, numerics: Lacking(numerics))
    explanation = fusion.explain(torch.softmax, options={"target": "lacking"})(torch.randn(2, 5), -1)
    assert "no compiler" in explanation.graphs[0].notes and "  no compiler" in str(explanation)
    viewed = fusion.explain(torch.t, options={"target": "lacking"})(torch.randn(2, 5))
    assert "no compiler" not in str(viewed)  # nothing is launched


def counted(x: Tensor, seen: Tensor) -> Tensor:
    """Changes an input before the kernel that is refused, so that the graph cannot begin anew."""
    seen.add_(1)
    return torch.softmax(x, -1)


def test_a_launch_that_is_refused_is_evaluated(late: str):
    fused = fusion.fuse(counted, dynamic=True, options={"target": late})
    seen = torch.zeros(3)
    torch.testing.assert_close(fused(torch.ones(2, 5), seen), torch.full((2, 5), 1 / 5))
    x = torch.randn(2, 7)
    with pytest.warns(fusion.FusionWarning, match="shared memory"):
        got = fused(x, seen)
    torch.testing.assert_close(got, torch.softmax(x, -1))
    x = torch.randn(2, 6)
    torch.testing.assert_close(fused(x, seen), torch.softmax(x, -1))
    torch.testing.assert_close(seen, torch.full((3,), 3.0))
    first, called = fusion.report(fused).graphs
    assert first.kernels and not first.failure
    assert "called" in called.label and "shared memory" in called.failure and not called.kernels


def products(x: Tensor, y: Tensor) -> Tensor:
    return ((x * y).exp().sum(-1) * y[..., 0]).sum()


def test_a_launch_that_is_refused_in_backward(late: str):
    fused = fusion.fuse(products, dynamic=True, options={"target": late})
    grads = []
    for call in (fused, fused, products):
        x, y = torch.linspace(0, 1, 14).reshape(2, 7).requires_grad_(), torch.ones(2, 7).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusion.FusionWarning)
            grads.append(torch.autograd.grad(call(x, y), (x, y)))
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[2])
    assert {graph.label for graph in fusion.report(fused).graphs if graph.failure} == {
        "forward, called",
        "backward, called",
    }


def test_a_launch_that_is_refused_is_raised_under_strict(late: str):
    fused = fusion.fuse(counted, options={"target": late, "strict": True})
    with pytest.raises(fusion.BuildError, match="shared memory"):
        fused(torch.ones(2, 7), torch.zeros(3))


# Refusals of Dynamo ---------------------------------------------------------------------------------------------------


def between(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def at_first(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 3


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x * 2
        torch._dynamo.graph_break()
    return x


def on_data(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x - 1


class Model(torch.nn.Module):
    """A module with a break in a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Sequential(torch.nn.Linear(5, 5), Part())

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).relu()


class Part(torch.nn.Module):
    """The part."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return y * 2


@pytest.mark.parametrize(
    ("f", "kernels", "text"),
    [
        (between, 2, r"^  graph break: between \(test_fallbacks\.py:\d+\): .*graph_break"),
        (at_first, 1, r"^graph break: at_first \(test_fallbacks\.py:\d+\): .*graph_break"),
        (in_a_loop, 0, r"^left to eager: in_a_loop \(test_fallbacks\.py:\d+\): .*graph_break"),
        (on_data, 2, r"^  graph break: on_data \(test_fallbacks\.py:\d+\): generic_jump"),
        (Model().eval(), 2, r"^  graph break: forward \(test_fallbacks\.py:\d+\): .*graph_break"),
    ],
    ids=["between", "at first", "in a loop", "on data", "in a part"],
)
def test_breaks_are_reported(f: Callable[[Tensor], Tensor], kernels: int, text: str):
    fused = fusion.fuse(f)
    torch.testing.assert_close(fused(X), f(X))
    for result in (fusion.report(fused), fusion.explain(f)(X)):
        assert len(result.kernels) >= kernels
        assert len(result.graph_breaks) == 1, result
        assert re.search(text, str(result), re.MULTILINE), result


def test_pytorch_modules_that_dynamo_refuses_are_reported():
    fused = fusion.fuse(torch.nn.GRU(5, 3))
    other = fusion.fuse(torch.nn.Linear(5, 3))
    for net in (fused, other):
        net(torch.ones(2, 5))
    (result,) = fusion.report(fused).graph_breaks
    assert result.whole and result.origin.name == "GRU" and "RNN" in result.reason
    assert fusion.report(other).graph_breaks == ()


def test_a_program_without_breaks_names_none():
    fused = fusion.fuse(lambda x: torch.softmax(x, -1))
    fused(X)
    assert fusion.report(fused).graph_breaks == ()


@torch._dynamo.config.patch(recompile_limit=2)
def test_the_limit_of_compilations_is_reported():
    def scaled(x: Tensor, by: str) -> Tensor:
        return x * len(by) if by != "none" else x

    fused = fusion.fuse(scaled)
    for by in ("a", "b", "c"):
        torch.testing.assert_close(fused(X, by), X)
    (result,) = fusion.report(fused).graph_breaks
    assert result.whole and "limit" in result.reason and result.origin.name == "scaled"


@torch._dynamo.config.patch(recompile_limit=1)
def test_the_limit_of_a_decorated_module_is_reported_where_that_is_written():
    class Decorated(torch.nn.Module):
        @passed_on
        def forward(self, x: Tensor, by: str) -> Tensor:
            return x * len(by)

    fused = fusion.fuse(Decorated())
    for by in ("a", "bb"):
        torch.testing.assert_close(fused(X, by), X * len(by))
    (result,) = fusion.report(fused).graph_breaks
    line = inspect.unwrap(Decorated.forward).__code__.co_firstlineno
    assert (
        result.whole and result.origin.name.endswith("Decorated") and result.origin.line == f"test_fallbacks.py:{line}"
    )


def passed_on(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(f)
    def wrapper(*args: object) -> Tensor:
        return f(*args)

    return wrapper


def test_a_region_that_failed_names_its_break(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fusion.compilation.graph_compiler, "compile_graph", broken)
    fused = fusion.fuse(lambda x: between(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusion.FusionWarning)
        torch.testing.assert_close(fused(X), X * 2 + 1)
    first, second = fusion.report(fused).graphs
    assert first.failure and first.graph_break is not None and "graph break: between" in str(first)
    assert second.failure and second.graph_break is None
