"""Scratch arrays: on stacks of 64 KiB, and where there is no memory for them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch

import fusion
from fusion.codegen.c.target import CTarget
from fusion.lowering.errors import OutOfMemory
from fusion.lowering.ir.kernel import Kernel, Role
from tests.codegen.kernels.large import LARGE
from tests.codegen.kernels.making import assert_same, expected, tensors
from tests.codegen.kernels.rows import softmax

ROOT = Path(__file__).resolve().parents[3]
TARGET = CTarget()

ON_SMALL_STACKS = (*(softmax(9, n, Role.WHOLE) for n in (4096, 8191, 16384, 32768)), LARGE["column softmax"])


def checked(kernel: Kernel) -> None:
    """Run a kernel on all threads, and compare with the evaluator."""
    given = tensors(kernel)
    want = expected(kernel, given)
    TARGET.build(kernel, TARGET.emit(kernel))(*given)
    assert_same(kernel, given, want)


def on_small_stacks() -> None:
    for kernel in ON_SMALL_STACKS:
        checked(kernel)


def program(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1).amax(-1)


def without_memory() -> None:
    """Call a program before, while and after the process is without memory."""
    torch.set_num_threads(64)  # 64 MiB of scratch arrays, which the C library does not hold back
    fused = fusion.fuse(program, options={"strict": True})
    x = torch.randn(64, 1 << 18)
    expected = program(x)
    torch.testing.assert_close(fused(x), expected)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), hard))
    for _ in range(2):
        try:
            fused(x)
        except MemoryError as error:
            print(isinstance(error, fusion.FusionError), error)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    torch.testing.assert_close(fused(x), expected)
    print("right with memory")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Run this module in a process with small stacks, and return what it prints: most of its time is its start."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_STACKSIZE": "64k"}
    command = [sys.executable, "-m", "tests.codegen.c.test_memory"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def test_stacks_of_64_kilobytes_are_enough(lines: list[str]) -> None:
    assert lines[-1] == "right on small stacks"


@pytest.mark.skipif(sys.platform != "linux", reason="measures the process as Linux shows it")
def test_a_program_without_memory_raises_and_its_next_call_works(lines: list[str]) -> None:
    *refused, last, _ = lines
    assert len(refused) == 2 and last == "right with memory"
    assert all(line.startswith("True there is no memory for the scratch arrays of kernel ") for line in refused)


SIZE = sympy.Symbol("n", integer=True, positive=True)
TOO_LARGE = 1 << 50


def softmax_of(n: int) -> list[torch.Tensor]:
    return [torch.randn(4, n), torch.empty(4, n)]


def assert_refused_then_right(kernel: Kernel) -> None:
    launch = TARGET.build(kernel, TARGET.emit(kernel))
    x, out = softmax_of(300)
    out.fill_(7.0)
    for _ in range(2):
        with pytest.raises(OutOfMemory, match=f"kernel {kernel.name}"):
            launch(x, out, TOO_LARGE)
    assert bool((out == 7.0).all()), "nothing was stored"
    launch(x, out, 300)
    torch.testing.assert_close(out, torch.softmax(x, -1))


def test_a_launch_without_memory_raises_and_the_next_one_works() -> None:
    assert_refused_then_right(softmax(4, SIZE, Role.WHOLE))


def test_a_kernel_that_shares_the_launch_may_be_without_memory() -> None:
    kernel = softmax(4, SIZE, Role.WHOLE)
    assert_refused_then_right(replace(kernel, beside=(kernel,)))
    assert_refused_then_right(replace(kernel, then=kernel))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_thread_has_the_arrays_of_another(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        checked(LARGE["softmax 16384"])
    finally:
        torch.set_num_threads(before)


def main() -> None:
    torch.set_num_threads(4)
    if sys.platform == "linux":
        without_memory()  # first: memory that other kernels have freed would be enough
    on_small_stacks()
    print("right on small stacks")


if __name__ == "__main__":
    main()
