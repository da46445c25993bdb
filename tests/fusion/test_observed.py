"""Compilations in logs, kernels in profiles."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._logging import _internal as torch_logging
from torch.autograd import profiler

import fusion

PROGRAM = """
import torch, fusion
fusion.fuse(lambda x: torch.softmax(x, 0) + 1)(torch.ones(3))
"""


def scaled(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1)


def names(profile: torch.profiler.profile) -> list[str]:
    return [event.name for event in profile.events()]


def test_kernels_are_in_the_profile_with_their_line() -> None:
    fused, x = fusion.fuse(scaled), torch.randn(4, 5)
    expected = fused(x)
    with torch.profiler.profile() as profile:
        for _ in range(3):
            assert torch.equal(fused(x), expected)
    (kernel,) = fusion.report(fused).kernels
    found = [name for name in names(profile) if name.startswith(kernel.name)]
    assert len(found) == 3
    assert all(name.startswith(f"{kernel.name} (test_observed.py:") for name in found)
    assert torch.equal(fused(x), expected)


def test_kernels_of_both_directions_and_of_modules_are_in_the_profile() -> None:
    fused = fusion.fuse(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.LayerNorm(4)))
    fused(torch.randn(2, 3)).sum().backward()
    with torch.profiler.profile() as profile:
        fused(torch.randn(2, 3)).sum().backward()
    seen = names(profile)
    for report in fusion.report(fused).graphs:
        for kernel in report.kernels:
            assert any(name.split(" (")[0] == kernel.name for name in seen), kernel.name


def test_changes_in_place_and_errors_are_the_same_under_a_profiler() -> None:
    fused, x = fusion.fuse(lambda x, i: x.add_(1)[i]), torch.zeros(3)
    with torch.profiler.profile():
        assert fused(x, torch.tensor([2])).item() == 1
        assert x.tolist() == [1, 1, 1]
        with pytest.raises(IndexError):
            fused(x, torch.tensor([3]))


def test_ranges_are_left_also_where_a_kernel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `emit_nvtx` needs it, which pushes and pops NVTX ranges on a GPU: see `tests/gpu/test_nvtx_gpu.py`."""
    steps: list[str] = []

    @contextmanager
    def ranged(name: str) -> Iterator[None]:
        steps.append(f"push {name.split(' (')[0]}")
        try:
            yield
        finally:
            steps.append("pop")

    fused, x = fusion.fuse(lambda x, i: (x.sin()[i], x.cumsum(0))), torch.zeros(3)
    fused(x, torch.tensor([2]))
    monkeypatch.setattr(profiler, "record_function", ranged)
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    fused(x, torch.tensor([2]))
    assert steps[0].startswith("push ") and steps[1::2] == ["pop"] * (len(steps) // 2) and len(steps) % 2 == 0
    del steps[:]
    with pytest.raises(IndexError):
        fused(x, torch.tensor([3]))
    assert steps and steps.count("pop") * 2 == len(steps)


class Messages(logging.Handler):
    """Keeps the messages of a logger; pytest's own plugin for this is off (see `pyproject.toml`)."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def messages() -> Iterator[Messages]:
    """Messages that the compiler logs during the test."""
    logger, handler = logging.getLogger("fusion"), Messages()
    level = logger.level
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_compilations_are_logged(messages: Messages) -> None:
    logging.getLogger("fusion").setLevel(logging.INFO)
    fusion.fuse(scaled)(torch.randn(4, 6))
    (line,) = messages.lines
    assert line.startswith("inference: ") and "in 1 kernel" in line
    logging.getLogger("fusion").setLevel(logging.DEBUG)
    fusion.fuse(scaled)(torch.randn(4, 7))
    assert any("kernel mul_amax" in line for line in messages.lines[1:])


def test_nothing_is_logged_by_default(messages: Messages, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts: list[str] = []
    monkeypatch.setattr(torch_logging, "trace_structured_artifact", lambda name, *_: artifacts.append(name))
    fusion.fuse(scaled)(torch.randn(4, 8))
    assert not messages.lines
    assert artifacts == ["fusion_inference"]  # whether PyTorch writes a trace is its own decision


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the log and the trace of one process in which PyTorch's variables ask for both."""
    folder = tmp_path_factory.mktemp("trace")
    environment = {"TORCH_LOGS": "fusion", "TORCH_TRACE": str(folder), "FUSION_CLOSE_CALLS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    (file,) = folder.iterdir()
    return done.stderr, file.read_text()


def test_pytorchs_variable_switches_logs_on(observed: tuple[str, str]) -> None:
    log, _ = observed
    assert "] inference: " in log and "kernel amax_sub_exp" in log


def test_a_trace_of_pytorch_has_an_artifact_for_each_graph(observed: tuple[str, str]) -> None:
    """In the form that tlparse lists: a line of metadata, then the indented payload."""
    lines = observed[1].splitlines()
    (start,) = [k for k, line in enumerate(lines) if '"name": "fusion_inference"' in line]
    assert '"encoding": "string"' in lines[start] and '"frame_id": 0' in lines[start]
    assert lines[start + 1].startswith("\tinference: ") and "kernel amax_sub_exp" in lines[start + 2]


@pytest.mark.skipif(shutil.which("tlparse") is None, reason="needs tlparse")
def test_tlparse_lists_the_report_of_each_graph(observed: tuple[str, str], tmp_path: Path) -> None:
    trace, listed = tmp_path / "trace.log", tmp_path / "listed"
    trace.write_text(observed[1])
    subprocess.run(["tlparse", "--strict", "--no-browser", "-o", listed, trace], check=True, capture_output=True)
    (report,) = listed.rglob("fusion_inference_*.txt")
    assert f"{report.parent.name}/{report.name}" in (listed / "index.html").read_text()
    assert "kernel amax_sub_exp" in report.read_text()


# Reports of what PyTorch's own functions compile ----------------------------------------------------------------------


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).sin()


def test_programs_that_pytorch_compiles_have_a_report() -> None:
    module, function = torch.compile(Scaled(), backend="fusion"), torch.compile(scaled, backend="fusion")
    assert not fusion.report(module).kernels and not fusion.report(function).kernels
    module(torch.ones(2, 3)), function(torch.ones(2, 3))
    assert [kernel.name for kernel in fusion.report(module).kernels][:1] == ["mul_sin"]
    assert all("mul_sin" not in kernel.name for kernel in fusion.report(function).kernels)
    assert len(fusion.report(function).kernels) == 1


def test_graph_breaks_are_in_the_report_of_what_pytorch_compiles() -> None:
    def broken(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos() + 1

    compiled = torch.compile(broken, backend="fusion")
    compiled(torch.ones(3))
    assert len(fusion.report(compiled).graphs) == 2
    assert len(fusion.report(compiled).graph_breaks) == 1


@pytest.mark.parametrize("program", [scaled, Scaled(), torch.compile(scaled, backend="eager"), 3])
def test_other_programs_have_no_report(program: object) -> None:
    with pytest.raises(TypeError, match="report takes what fuse or"):
        fusion.report(program)
