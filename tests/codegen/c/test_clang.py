"""Kernels that clang compiles compute what those of GCC compute; a compiler for other systems is refused."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.codegen.c import build, compiler
from fusion.codegen.c.compiler import CLANG, GCC, Compiler
from tests.zig import clang


@pytest.fixture
def by_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", clang(tmp_path / "clang"))
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    assert compiler.find_compiler().kind == CLANG


def rows() -> torch.Tensor:
    x = torch.randn(9, 70)
    x[2], x[3], x[4, 5] = -torch.inf, torch.inf, torch.nan
    return x


def masked_attention(q: torch.Tensor) -> torch.Tensor:
    at = torch.arange(400)
    return (q @ q.mT + torch.where(at <= at[:, None], 0.0, -torch.inf)).softmax(-1) @ q


PROGRAMS: dict[str, tuple[Callable[..., object], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "extremes": (lambda x: (x.amax(1), x.amin(1), x.amax(0), x.argmax(1)), lambda: (rows(),)),
    "wide extremes": (lambda x: x.amax(1), lambda: (torch.full((3, 5000), -torch.inf),)),
    "integers": (lambda x: (x * 1e30).to(torch.int32), lambda: (torch.tensor([1.0, -1.0, torch.nan, 0.5] * 9),)),
    "functions": (lambda x: F.gelu(x).tanh() + x.exp().log1p() + torch.fmod(x, 0.3), lambda: (torch.randn(3, 101),)),
    "half": (lambda x: F.layer_norm(x, x.shape[1:]).softmax(-1), lambda: (torch.randn(5, 77).half(),)),
    "bfloat16": (lambda x: F.silu(x).cumsum(1), lambda: (torch.randn(5, 77).bfloat16(),)),
    "attention": (masked_attention, lambda: (torch.randn(2, 4, 400, 16),)),
    "scatter": (
        lambda x, i: torch.zeros(5).index_add(0, i, x),
        lambda: (torch.randn(40), torch.randint(5, (40,))),
    ),
}


@pytest.mark.usefixtures("by_clang")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_eager(name: str) -> None:
    program, inputs = PROGRAMS[name]
    torch.manual_seed(0)
    given = inputs()
    fused = fusion.fuse(program, options={"strict": True, "graph_cache": False})
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if given[0].dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(fused(*given), program(*given), equal_nan=True, **tolerance)
    assert "kernels run on one thread" in str(fusion.report(fused)) or build.spreads_loops(compiler.find_compiler())


def compiler_of(version: str, compiles_for: str) -> Compiler:
    return Compiler(("cc",), version, "", compiles_for)


def test_each_compiler_gets_its_flags() -> None:
    gcc, other = compiler_of("gcc 12", "x86_64-linux-gnu"), compiler_of("clang 18", "x86_64-linux-gnu")
    assert (gcc.kind, other.kind) == (GCC, CLANG)
    for flag in ("-fno-tree-ter", "-mno-mmx"):
        assert flag in gcc.flags() and flag not in other.flags()
    assert "-mno-mmx" not in compiler_of("gcc 12", "aarch64-linux-gnu").flags()
    for each in (gcc, other):
        assert {"-ffp-contract=off", "-fwrapv", "-fopenmp"} <= {*each.flags()}
        assert "-fopenmp-simd" in each.flags(threads=False) and "-fopenmp" not in each.flags(threads=False)


@pytest.mark.parametrize(
    ("compiles_for", "machine", "system"),
    [
        ("aarch64-linux-gnu", "aarch64", "Linux"),
        ("arm64-apple-darwin24.0.0", "aarch64", "Darwin"),
        ("x86_64-w64-windows-gnu", "x86_64", "Windows"),
        ("x86_64-pc-linux-gnu", "x86_64", "Linux"),
    ],
)
def test_what_a_compiler_compiles_for(
    compiles_for: str, machine: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiler_of("clang 18", compiles_for)
    assert (found.machine, found.system) == (machine, system)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert found.is_cross == (compiles_for != "x86_64-pc-linux-gnu")
    assert ("-march=native" in found.flags()) != found.is_cross


def test_a_cross_compiler_is_not_taken_for_kernels_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cc"
    script.write_text('#!/bin/sh\ncase "$1" in -dumpmachine) echo vax-linux-gnu;; *) echo "gcc 12";; esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(fusion.BuildError, match="compiles for vax-linux-gnu, which is not this machine"):
        build.build_object("int f(void) { return 0; }", "f", bytes)


def test_windows_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(fusion.Unsupported, match=r"kernels in C are not built for Windows") as refusal:
        compiler.find_compiler()
    assert "WSL" in str(refusal.value)
    fused = fusion.fuse(lambda x: x.exp() + 12.5, options={"graph_cache": False})
    with pytest.warns(fusion.FusionWarning, match=r"running eagerly: .*kernels in C are not built for Windows"):
        torch.testing.assert_close(fused(torch.ones(3)), torch.ones(3).exp() + 12.5)
