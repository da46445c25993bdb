"""Loops over the cells of recurrent networks: one call, one parallel region, and the same bits as launch by launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion
from fusion.codegen.c import build, sequence
from fusion.codegen.c.calls import Entry
from fusion.compilation import compile as compilation
from fusion.runtime import sequence_calls
from fusion.schedule.rewrites import vector_products

OPTIONS = {"target": "c", "strict": True, "graph_cache": False}
STEPS = 12
THREADS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of few rows are kernels whatever the price; the number of threads is as before after a test."""
    monkeypatch.setattr(vector_products, "_is_faster", lambda *given: True)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[list[Entry]]:
    """The functions of each sequence."""
    seen: list[list[Entry]] = []
    real = sequence_calls.launched_in_sequence

    def noted(entries: Any, places: Any, function: Any) -> Any:
        seen.append(list(entries))
        return real(entries, places, function)

    monkeypatch.setattr(sequence_calls, "launched_in_sequence", noted)
    return seen


def one_by_one(f: Callable[..., object], *given: Tensor) -> object:
    """The results of separate launches; what was compiled for them is forgotten."""
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "joined", lambda module: module)
        results = fusion.fuse(f, options=OPTIONS)(*given)
    torch.compiler.reset()
    return results


def loop_over(cell: nn.Module, kind: str) -> Callable[..., Tensor]:
    def loop(xs: Tensor, h: Tensor, c: Tensor) -> Tensor:
        hidden = []
        for x in xs:
            if kind == "LSTM":
                h, c = cell(x, (h, c))
            else:
                h = cell(x, h)
            hidden.append(h)
        return torch.stack(hidden)

    return loop


@pytest.mark.parametrize(("rows", "size"), [(1, 128), (8, 256), (16, 256)])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_cells_have_the_same_bits_on_any_number_of_threads(entries, kind: str, rows: int, size: int) -> None:
    torch.manual_seed(0)
    cell = getattr(nn, f"{kind}Cell")(size, size)
    given = torch.randn(STEPS, rows, size), torch.randn(rows, size), torch.randn(rows, size)
    loop = loop_over(cell, kind)
    with torch.no_grad():
        for count in THREADS:
            torch.set_num_threads(count)
            separate = one_by_one(loop, *given)
            fused = fusion.fuse(loop, options=OPTIONS)
            for _ in range(3):
                assert torch.equal(fused(*given), separate)
        torch.testing.assert_close(separate, loop(*given), rtol=1e-4, atol=1e-5)
    assert len(entries) == len(THREADS)
    for steps in entries:
        assert len(steps) >= STEPS
        assert sum(each.share != 0 for each in steps) >= (STEPS - 1 if rows > 1 else 0)


def looked_up(table: Tensor, tokens: Tensor, h: Tensor, w: Tensor) -> Tensor:
    """A loop whose steps fail for a token that is not in the table."""
    states = []
    for token in tokens:
        h = torch.tanh(F.linear(h + table[token], w))
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("count", THREADS)
@pytest.mark.parametrize("position", [0, 5, STEPS - 1])
def test_an_index_out_of_range_is_raised_by_its_step(entries, count: int, position: int) -> None:
    torch.set_num_threads(count)
    table, h, w = torch.randn(30, 256), torch.randn(8, 256), torch.randn(256, 256) / 16
    tokens = torch.randint(30, (STEPS, 8))
    fused = fusion.fuse(looked_up, options=OPTIONS)
    expected = looked_up(table, tokens, h, w)
    torch.testing.assert_close(fused(table, tokens, h, w), expected, rtol=1e-4, atol=1e-5)
    assert sum(each.share != 0 for each in entries[-1]) >= STEPS - 2
    wrong = tokens.clone()
    wrong[position, 3] = 30
    for _ in range(3):
        with pytest.raises(IndexError, match=r"index 30 is out of bounds .*\n  at: test_recurrent.py"):
            fused(table, wrong, h, w)
        torch.testing.assert_close(fused(table, tokens, h, w), expected, rtol=1e-4, atol=1e-5)


def test_a_saved_loop_is_one_region_too(entries, tmp_path) -> None:
    torch.manual_seed(0)
    cell = nn.RNNCell(256, 256)
    given = torch.randn(STEPS, 8, 256), torch.randn(8, 256), torch.randn(8, 256)
    loop = loop_over(cell, "RNN")
    with torch.no_grad():
        expected = one_by_one(loop, *given)
    fusion.save(loop, tmp_path / "loop.fusion", inputs=given)
    entries.clear()
    artifact = fusion.load(tmp_path / "loop.fusion")
    (steps,) = entries
    assert sum(each.share != 0 for each in steps) >= STEPS - 1
    for count in THREADS:
        torch.set_num_threads(count)
        assert torch.equal(artifact(*given), expected)


def test_without_threads_a_share_is_all_of_the_work(entries, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cell = nn.RNNCell(256, 256)
    given = torch.randn(STEPS, 8, 256), torch.randn(8, 256), torch.randn(8, 256)
    loop = loop_over(cell, "RNN")
    torch.set_num_threads(2)
    with torch.no_grad():
        expected = one_by_one(loop, *given)
        monkeypatch.setattr(build, "spreads_loops", lambda compiler: False)
        sequence.in_sequence.cache_clear()
        try:
            assert torch.equal(fusion.fuse(loop, options=OPTIONS)(*given), expected)
        finally:
            sequence.in_sequence.cache_clear()
    assert sum(each.share != 0 for each in entries[-1]) >= STEPS - 1
