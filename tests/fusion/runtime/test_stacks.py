"""Results are stored where they are concatenated: what modules call, and the same results as eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OpOverload

import fusion
from fusion.compilation import compile as compilation
from fusion.lowering.rules.assembly import MAX_PARTS
from fusion.runtime import sequences
from tests.fusion.runtime.test_recurrent import loop_over

OPTIONS = {"target": "c", "strict": True, "graph_cache": False}
STEPS = MAX_PARTS + 4
"""So many tensors are not concatenated by a kernel."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of what each module calls."""
    seen: list[list[str]] = []

    def noted(module: fx.GraphModule) -> fx.GraphModule:
        result = sequences.joined(module)
        called = [node.target for node in result.graph.nodes if node.op == "call_function"]
        seen.append([str(each) if isinstance(each, OpOverload) else each.__name__ for each in called])
        return result

    monkeypatch.setattr(compilation, "joined", noted)
    return seen


def states(x: Tensor, w: Tensor) -> list[Tensor]:
    """The states of a loop whose step is a kernel."""
    found = []
    for _ in range(STEPS):
        x = torch.softmax(x * w, 0)
        found.append(x)
    return found


def same(f: Callable[..., object], *given: Tensor) -> object:
    """Compare with eager, twice: nothing may be left of a call."""
    fused = fusion.fuse(f, options=OPTIONS)
    for _ in range(2):
        got = fused(*given)
        torch.testing.assert_close(got, f(*given))
    return got


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.rand(5, 300).to(dtype), torch.rand(5, 300).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("whole", [torch.stack, torch.cat])
def test_states_are_stored_in_their_stack(called, whole, dtype):
    with torch.no_grad():
        same(lambda x, w: whole(states(x, w)), *given(dtype))
    (empty, launch) = called[-1]
    assert empty == "empty" and launch.startswith("launch_"), called


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_loop_over_a_cell_is_one_launch(called, kind):
    cell = getattr(nn, f"{kind}Cell")(40, 24)
    with torch.no_grad():
        same(loop_over(cell, kind), torch.randn(STEPS, 3, 40), torch.randn(3, 24), torch.randn(3, 24))
    assert "aten.stack.default" not in called[-1], called
    assert sum(name.startswith("launch_") for name in called[-1]) == 1, called


def test_a_state_that_is_returned_is_copied_and_shares_no_memory(called):
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        found = states(x, w)
        return torch.stack(found), found[-1]

    with torch.no_grad():
        stack, last = same(f, *given())
    assert called[-1].count("aten.copy_.default") == 1 and "aten.stack.default" not in called[-1], called
    last.zero_()
    assert stack[-1].abs().sum() > 0


def test_an_input_and_a_repeated_state_are_copied(called):
    def f(x: Tensor, w: Tensor) -> Tensor:
        found = states(x, w)
        return torch.stack([x, *found, found[1]])

    with torch.no_grad():
        same(f, *given())
    assert called[-1].count("aten.copy_.default") == 3 and "aten.stack.default" not in called[-1], called


def test_many_parts_that_are_not_computed_are_left_to_one_call(called):
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([*x.unbind(), *states(x, w)[0].unbind(), *states(x, w)[1].unbind(), *w.unbind()])

    with torch.no_grad():
        same(f, *given())
    assert "aten.stack.default" in called[-1] and "aten.copy_.default" not in called[-1], called


def test_states_that_are_read_later_are_left_to_one_call(called):
    """A tensor that dies may be overwritten, and a part with it."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        found = states(x, w)
        whole = torch.stack(found)
        far = torch.linalg.qr(whole[0]).R.abs().sum() * 0
        return whole, *(torch.softmax(each + far, 0).cumsum(0) for each in found)

    with torch.no_grad():
        same(f, *given())
    assert "aten.copy_.default" not in called[-1], called


def test_other_strides_are_left_to_one_call(called):
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack(states(x, w), 1)

    with torch.no_grad():
        same(f, *given())
        assert "aten.stack.default" in called[-1], called
        same(f, torch.rand(1, 300), torch.rand(1, 300))  # where these have no effect
    assert "aten.stack.default" not in called[-1], called


def test_states_of_several_lengths_are_stored_in_their_concatenation(called):
    def f(x: Tensor, w: Tensor) -> Tensor:
        whole = states(x, w)
        return torch.cat([torch.softmax(each[: k % 5], 0) for k, each in enumerate(whole)])

    with torch.no_grad():
        same(f, *given())
    assert "aten.cat.default" not in called[-1], called


def test_states_of_other_dtypes_are_converted(called):
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([each if k else each.to(torch.float64) for k, each in enumerate(states(x, w))])

    with torch.no_grad():
        same(f, *given())


def test_saved_states_for_backward_are_tensors_of_their_own(called):
    x, w = (each.requires_grad_() for each in given())
    fused = fusion.fuse(lambda x, w: torch.stack(states(x, w)), options=OPTIONS)
    got = torch.autograd.grad(fused(x, w).square().sum(), (x, w))
    expected = torch.autograd.grad(torch.stack(states(x, w)).square().sum(), (x, w))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_a_failed_check_names_its_line(called):
    def f(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
        return torch.stack([torch.softmax(each[index].cumsum(0), 0) for each in states(x, w)])

    with torch.no_grad():
        fused = fusion.fuse(f, options=OPTIONS)
        x, w = given()
        index = torch.tensor([0, 4, 2])
        torch.testing.assert_close(fused(x, w, index), f(x, w, index))
        assert any(name.startswith("launch_") for name in called[-1]) and "aten.stack.default" not in called[-1], called
        with pytest.raises(IndexError, match=r"out of bounds .*\n  at: test_stacks.py"):
            fused(x, w, torch.tensor([0, 5, 2]))


def test_a_saved_program_stores_them_there_too(tmp_path: Path):
    class Loop(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            found = states(x, w)
            return torch.stack(found), F.relu(found[-1])

    with torch.no_grad():
        fusion.save(Loop(), tmp_path / "loop.fusion", inputs=given(), options={"target": "c"})
        loaded = fusion.load(tmp_path / "loop.fusion")
        for _ in range(2):
            x, w = given()
            torch.testing.assert_close(loaded(x, w), Loop()(x, w))
