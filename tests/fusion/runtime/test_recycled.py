"""Large tensors on a CPU that no program sees are in memory of earlier ones; results of a program never are."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

import fusion
from fusion.runtime import recycled
from fusion.runtime.memory import LARGE, allocator, empty_hidden, empty_large
from fusion.runtime.recycled import HUGE_PAGE, RECYCLER, Recycler

CPU = torch.device("cpu")
ROWS = LARGE // 4 // 1024 + 3
"""Rows of 1024 numbers that are large."""

pytestmark = pytest.mark.skipif(RECYCLER is None, reason="the system has no huge pages that it could take back")


def addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the address of each recycled vector is appended."""
    seen: list[int] = []
    before = recycled.recycled

    def noted(count: int, dtype: torch.dtype) -> Tensor | None:
        vector = before(count, dtype)
        assert vector is not None
        seen.append(vector.data_ptr())
        return vector

    monkeypatch.setattr("fusion.runtime.memory.recycled", noted)
    return seen


# Blocks ---------------------------------------------------------------------------------------------------------------


def test_a_freed_block_serves_the_next_tensor_of_its_size() -> None:
    recycler = Recycler()
    first = recycler.owner(10 * HUGE_PAGE)
    address = first.block.address
    assert address % HUGE_PAGE == 0
    del first
    assert recycler.owner(5 * HUGE_PAGE).block.address != address  # half of it would be lost
    assert recycler.held <= recycler.most


def test_blocks_never_have_more_bytes_than_were_in_use_at_once() -> None:
    recycler = Recycler()
    for step in range(60):
        owners = [recycler.owner((1 + (7 * step + k) % 11) * HUGE_PAGE) for k in range(1 + step % 3)]
        used = sum(owner.block.size for owner in owners)
        assert used <= recycler.held <= recycler.most
        del owners
    assert 0 < recycler.held <= recycler.most <= 40 * HUGE_PAGE


def test_blocks_in_use_do_not_overlap_in_threads() -> None:
    recycler, failed = Recycler(), list[str]()

    def work(mark: int) -> None:
        for _ in range(50):
            owner = recycler.owner(HUGE_PAGE)
            owner[0] = owner[HUGE_PAGE - 1] = mark
            other = recycler.owner(HUGE_PAGE)
            other[0] = other[HUGE_PAGE - 1] = mark + 1
            if (owner[0], owner[HUGE_PAGE - 1]) != (bytes([mark]), bytes([mark])):
                failed.append(f"{mark}: {owner[0]!r}")

    threads = [threading.Thread(target=work, args=(2 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert recycler.held <= recycler.most <= 16 * HUGE_PAGE


ENDS = """
import os
from fusion.runtime.recycled import RECYCLER
from fusion.runtime.memory import LARGE, empty_hidden
last = empty_hidden((LARGE,), (1,), __import__("torch").int8)
with RECYCLER._lock:  # another thread, at the moment of the fork
    child = os.fork()
if child == 0:
    again = empty_hidden((LARGE,), (1,), last.dtype).fill_(3)
    os._exit(int(again[-1]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_forks_and_ends_with_tensors_in_use() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=True)
    assert (ended.stdout.strip(), ended.stderr.strip()) == ("3", "")


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_tensors(dtype: torch.dtype) -> None:
    width = LARGE // dtype.itemsize // 4 + 7
    made = empty_hidden((4, width), (width, 1), dtype)
    assert (made.shape, made.stride(), made.dtype) == ((4, width), (width, 1), dtype)
    assert not made._is_view()
    made.fill_(1)
    assert made[3, -1] == 1 and made[0, 0] == 1
    assert empty_hidden((0, width), (width, 1), dtype).numel() == 0
    assert empty_hidden((width, 4), (1, width), dtype).stride() == (1, width)


def test_the_allocator_is_for_hidden_tensors() -> None:
    assert allocator(CPU, CPU, LARGE, hidden=True) is empty_hidden
    assert allocator(CPU, CPU, LARGE) is empty_large
    assert allocator(CPU, CPU, LARGE - 1, hidden=True) not in (empty_hidden, empty_large)


# Programs -------------------------------------------------------------------------------------------------------------


def between(x: Tensor, y: Tensor) -> Tensor:
    """The product is large, and only the greatest numbers of its rows leave."""
    return torch.topk(x @ y, 3).values


def test_a_program_finds_the_memory_of_its_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = addresses(monkeypatch)
    x, y = torch.randn(ROWS, 16), torch.randn(16, 1024)
    fused = fusion.fuse(between, options={"strict": True})
    for _ in range(3):
        torch.testing.assert_close(fused(x, y), between(x, y))
    assert len(seen) >= 3
    assert len(set(seen)) == 1
    del fused
    assert RECYCLER is not None and RECYCLER.held <= RECYCLER.most


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin(),
        lambda x: x.sin().unflatten(0, (-1, 1)),
        lambda x: x.sin()[3:],
        lambda x: (x @ x.new_ones(1024, 1024)).t(),
    ],
    ids=["result", "view", "rows", "turned"],
)
def test_results_have_memory_of_their_own(function, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = addresses(monkeypatch)
    x = torch.randn(ROWS, 1024)
    fused = fusion.fuse(function, options={"strict": True})
    first = fused(x)
    assert first.untyped_storage().data_ptr() not in seen
    assert first.untyped_storage().resizable()
    kept = first.clone()
    fused(x + 1)
    assert torch.equal(first, kept)


def test_gradients_read_what_forward_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forward passes are alive at once, and their saved tensors differ."""
    seen = addresses(monkeypatch)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.vector_norm((x @ y).sin().exp().flip(0).cumsum(-1), dim=-1)

    def gradient(program, at: Tensor, y: Tensor):
        x = at.clone().requires_grad_()
        return program(x, y), x

    y = torch.randn(16, 1024)
    points = [torch.randn(ROWS, 16) for _ in range(2)]
    fused = fusion.fuse(loss, options={"strict": True})
    for _ in range(2):
        results = [gradient(fused, at, y) for at in points]
        for (value, x), at in reversed([*zip(results, points, strict=True)]):
            want, to = gradient(loss, at, y)
            (value.sum()).backward()
            (want.sum()).backward()
            torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(x.grad, to.grad, rtol=1e-3, atol=1e-2)
    assert seen


def test_programs_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(ROWS, 16), torch.randn(16, 1024)
    fused, failed = fusion.fuse(between, options={"strict": True}), list[str]()
    want = {k: between(x + k, y) for k in range(3)}
    fused(x, y)

    def work(k: int) -> None:
        for _ in range(3):
            if not torch.allclose(fused(x + k, y), want[k], rtol=1e-4, atol=1e-4):
                failed.append(str(k))

    threads = [threading.Thread(target=work, args=(k,)) for k in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
