"""Other backends of a process trace as without Fusion, also after it has compiled something."""

from __future__ import annotations

import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.eval_frame import get_compiler_fn

from fusion.backend import Backend, fusion_backend
from fusion.calls.prewarm import is_ours
from fusion.options import Options

ROOT = Path(__file__).resolve().parents[2]


@cache
def traces_after(*steps: str) -> str:
    """Return the traces of another backend after some steps in a separate process, which checks PyTorch's tables."""
    command = [sys.executable, "-m", "tests.fusion.trace_other_backends", *steps]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_without_fusion_a_mask_breaks_the_graph_and_dropout_is_a_copy() -> None:
    """Otherwise the comparison would be empty."""
    alone = traces_after()
    assert alone.startswith("1 breaks: ['Unsupported Tensor.item()")
    assert "aten.clone.default" in alone


def test_other_backends_trace_as_without_fusion() -> None:
    """Fusion traces as without other backends, too, whatever state of Dynamo was reset."""
    assert traces_after("imported", "trace_once", "reset", "compiled", "reset", "compiled") == traces_after()


def other(graph: fx.GraphModule, inputs: object) -> fx.GraphModule:
    return graph


OWN = Backend(Options())


@pytest.mark.parametrize("backend", ["fusion", fusion_backend, OWN, partial(OWN, alone=False)])
def test_a_backend_of_ours_is_known_however_pytorch_wraps_it(backend: object) -> None:
    assert is_ours(wrapped(backend)) and is_ours(DDPOptimizer(1 << 20, wrapped(backend)).compile_fn)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", other, partial(other), None])
def test_another_backend_is_not_taken_for_ours(backend: object) -> None:
    assert not is_ours(wrapped(backend)) and not is_ours(DDPOptimizer(1 << 20, wrapped(backend)).compile_fn)


def wrapped(backend: object) -> object:
    """A backend as `torch.compile` gives it to Dynamo."""
    return backend and get_compiler_fn(torch._TorchCompileWrapper(backend, None, None, None))  # type: ignore[no-untyped-call]
