"""Kernels under GCC's sanitizers: no out-of-bounds access, no undefined behaviour except wrapping integers.

New memory and arrays are filled with NaN.  Runs in a separate process, which ends at the first report: the sanitizers'
libraries have to be loaded before all others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fusion.codegen.c.target import CTarget
from tests.codegen.c.test_crossing import gradients
from tests.codegen.kernels.making import assert_same, expected, tensors
from tests.codegen.kernels.pointwise import add
from tests.codegen.kernels.small import SMALL

SECONDS = 300
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")
COMPILER = (
    *("gcc", "-g1", "-fsanitize=address,shift,integer-divide-by-zero,bounds,alignment,pointer-overflow"),
    *("-fno-sanitize-recover=all", "-ftrivial-auto-var-init=pattern"),
    *("--param", "asan-instrumentation-with-call-threshold=0"),  # calls are compiled several times as fast
)
ASAN = "detect_leaks=0:max_malloc_fill_size=100000000:malloc_fill_byte=255"

KINDS = (
    *("padded", "gather", "sampled", "bias_gelu bf16", "transposed_add", "softmax f16", "softmax of odd rows"),
    *("layernorm bf16", "column softmax, tall", "column shift"),
    *(
        "scan, normalised, looped over",
        "scan of columns, looped over",
        "total",
        "matmul ragged",
        "matmul float16 10",
        "gated turned",
        "online attention window",
    ),
    *("attention_dkv causal", "linear_logsumexp, parts", "partial_sums", "norm_backward"),
)

KERNELS = {**{name: SMALL[name] for name in KINDS}, "gradients in one nest": gradients(203, 150, 12, window=70)}

TOO_SHORT = "add, of tensors that are too short"


@cache
def libraries() -> tuple[str, ...]:
    """Where the sanitizers' libraries are; skips where a compiler is without them."""
    try:
        probe = [*COMPILER, "-c", "-x", "c", os.devnull, "-o", os.devnull]
        subprocess.run(probe, check=True, capture_output=True, timeout=SECONDS)
        asked = [["gcc", f"-print-file-name={name}"] for name in LIBRARIES]
        result = tuple(
            subprocess.run(each, check=True, capture_output=True, text=True).stdout.strip() for each in asked
        )
    except (OSError, subprocess.CalledProcessError):
        result = ()
    if not result or not all(map(os.path.isabs, result)):
        pytest.skip("needs gcc with its sanitizers")
    return result


@cache
def ran() -> subprocess.CompletedProcess[str]:
    """Run all kernels in one process, then the faulty one: starting a process takes as long as running them."""
    root = Path(__file__).resolve().parents[3]
    settings = {"LD_PRELOAD": ":".join(libraries()), "ASAN_OPTIONS": ASAN, "CC": " ".join(COMPILER)}
    command = [sys.executable, "-m", "tests.codegen.c.test_sanitized"]
    return subprocess.run(
        command, cwd=root, env=os.environ | settings, timeout=SECONDS, check=False, capture_output=True, text=True
    )


def test_kernels_reach_for_nothing_else():
    assert ran().stdout.splitlines() == [*KERNELS, TOO_SHORT], ran().stdout + ran().stderr


def test_a_tensor_that_is_too_short_is_noticed():
    assert ran().returncode != 0
    assert "heap-buffer-overflow" in ran().stderr
    assert "in add" in ran().stderr


def main() -> None:
    """Run the kernels, then one on tensors that are smaller than it assumes."""
    del os.environ["LD_PRELOAD"]  # compilers run at their own speed
    target = CTarget()
    for name, kernel in KERNELS.items():
        print(name, flush=True)
        given = tensors(kernel)
        want = expected(kernel, given)
        target.build(kernel, target.emit(kernel))(*given)
        assert_same(kernel, given, want)
    print(TOO_SHORT, flush=True)
    target.build(add(7), target.emit(add(7)))(*tensors(add(6)))


if __name__ == "__main__":
    main()
