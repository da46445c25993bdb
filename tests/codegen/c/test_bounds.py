"""Kernels do not read past their tensors, which are placed between inaccessible pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import fusion

SECONDS = 300


def fenced(x: torch.Tensor, *, last: bool) -> torch.Tensor:
    """A copy of `x` that ends where forbidden memory begins, or begins where that ends."""
    page, bytes_ = mmap.PAGESIZE, x.numel() * x.element_size()
    pages = -(-bytes_ // page)
    held = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(held))
    protect = ctypes.CDLL(None).mprotect
    for fence in (start, start + (pages + 1) * page):
        assert protect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
    offset = page + (pages * page - bytes_ if last else 0)
    return torch.frombuffer(held, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)


def softmax_of_padded(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (1, 2)).masked_fill(F.pad(mask, (1, 2)), -1e9).softmax(-1)


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    **{f"padding_{width}": (lambda x: F.pad(x, (1, 3)), (torch.randn(7, width),)) for width in (29, 40, 50)},
    "softmax": (softmax_of_padded, (torch.randn(29, 29), torch.rand(29, 29) > 0.5)),
    "shifted": (lambda x: (F.pad(x, (3, 0))[:, :-3] * x).sum(1), (torch.randn(30, 30),)),
    "halves": (lambda x: F.pad(x, (2, 5)).sum(1), (torch.randn(30, 30).bfloat16(),)),
}


def test_masked_lanes_read_nothing():
    """In a process of its own, which a read out of bounds ends."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "tests.codegen.c.test_bounds"]
    ran = subprocess.run(
        command, cwd=root, env=os.environ, timeout=SECONDS, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout


def main() -> None:
    for name, (f, args) in CASES.items():
        print(name, flush=True)
        fused = fusion.fuse(f, options={"target": "c", "strict": True})
        for last in (False, True):
            given = [fenced(x, last=last) for x in args]
            torch.testing.assert_close(fused(*given), f(*args))


if __name__ == "__main__":
    main()
