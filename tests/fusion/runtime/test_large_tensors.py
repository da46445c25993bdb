"""Large tensors on a CPU are allocated in huge pages: results of kernels, of the library's products and of chunks."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusion
from fusion.artifact.weights import ALIGNED, buffer_of
from fusion.runtime.memory import LARGE, allocator, allocator_device, empty_large

CPU = torch.device("cpu")
SMAPS = Path("/proc/self/smaps")

requested = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not SMAPS.exists() or "VmFlags" not in SMAPS.read_text(),
    reason="the system does not say for which memory huge pages are requested",
)


def in_huge_pages(tensor: Tensor) -> bool:
    """Return whether huge pages are requested for the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.untyped_storage().nbytes() // 2
    inside = False
    for line in SMAPS.read_text().splitlines():
        if mapped := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(mapped[1], 16) <= middle < int(mapped[2], 16)
        elif inside and line.startswith("VmFlags"):
            return "hg" in line.split()
    raise AssertionError("the tensor is not in a mapping")


@requested
def test_only_large_tensors_request_them() -> None:
    large = empty_large((LARGE // 4 + 5,), (1,), torch.float32)
    assert in_huge_pages(large)
    assert not in_huge_pages(torch.empty(LARGE))
    small = empty_large((3, 5), (5, 1), torch.int16)
    assert small.shape == (3, 5)
    assert small.stride() == (5, 1)
    large.fill_(1.5)
    assert large[-1] == 1.5


@requested
def test_weights_of_an_artifact_are_read_into_them() -> None:
    held = buffer_of(LARGE)
    assert in_huge_pages(held)
    assert held.shape == (LARGE,)
    assert held.data_ptr() % ALIGNED == 0
    assert not in_huge_pages(buffer_of(LARGE // 2))


def test_the_allocator_is_chosen_by_size() -> None:
    assert allocator(CPU, CPU, LARGE - 1) is not empty_large
    assert allocator(CPU, CPU, LARGE) is empty_large
    assert allocator(CPU, CPU, None) is empty_large
    assert allocator(torch.device("meta"), CPU, LARGE) is None
    assert allocator_device(empty_large) == "cpu"


@requested
def test_results_of_kernels_and_products(tmp_path: Path) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x @ y, x.sin(), torch.addmm(y[:1], x, y)

    x, y = torch.randn(4099, 16), torch.randn(16, 2051)
    fused = fusion.fuse(f, options={"strict": True})
    for given in ((x, y), (x, y.requires_grad_())):  # what PyTorch refuses to write to a given tensor
        with torch.no_grad():
            products = fused(*given)
        assert in_huge_pages(products[0])
        assert in_huge_pages(products[2])
        assert not in_huge_pages(products[1])
        for ours, theirs in zip(products, f(*given), strict=True):
            torch.testing.assert_close(ours, theirs)

    greatest = fusion.fuse(lambda x, y: (x @ y).argmax(-1), options={"strict": True})
    assert torch.equal(greatest(x, y), (x @ y).argmax(-1))
    wide = fusion.fuse(lambda x: x[:, :1] + torch.arange(2051.0), options={"strict": True})
    assert in_huge_pages(wide(x))
    path = tmp_path / "f.fusion"
    fusion.save(f, path, inputs=(x, y.detach()))
    loaded = fusion.load(path)
    for ours, theirs in zip(loaded(x, y.detach()), f(x, y.detach()), strict=True):
        torch.testing.assert_close(ours, theirs)


@requested
def test_results_of_symbolic_sizes() -> None:
    fused = fusion.fuse(lambda x: x[:, :1] * torch.arange(2048.0), dynamic=True, options={"strict": True})
    for rows in (4096, 6000, 70):
        x = torch.randn(rows, 3)
        result = fused(x)
        torch.testing.assert_close(result, x[:, :1] * torch.arange(2048.0))
        # A small result can lie in memory that a large one has left, for which huge pages stay requested.
        assert rows < 4096 or in_huge_pages(result)
