"""Long sums of exponentials whose logarithm is taken: one instruction for each term, and one walk."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from fusion.codegen.triton import TritonTarget
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.decompositions import decompositions
from fusion.schedule.kernels import KernelCall

pytestmark = pytest.mark.usefixtures("without_disassembly")

TARGET = TritonTarget("sm_90")
LONG = 4096


def text(function: Callable[[Tensor], object], columns: int) -> str:
    """Return the kernels of a program on logits in bfloat16, without the list of operations that heads each."""
    with FakeTensorMode():
        graph = make_fx(function, decomposition_table=decompositions())(torch.empty(512, columns, dtype=torch.bfloat16))
    _, schedule = schedule_graph(graph, TARGET, Trace(None, "forward"))
    kernels = (TARGET.emit(step.kernel) for step in schedule.steps if isinstance(step, KernelCall))
    return "\n".join(kernel.partition("@triton.jit")[2] for kernel in kernels)


def surprise(logits: Tensor) -> Tensor:
    return -F.log_softmax(logits.float(), -1)[:, 3]


def surprise_and_gradient(logits: Tensor) -> tuple[Tensor, Tensor]:
    logs = F.log_softmax(logits.float(), -1)
    return -logs[:, 3], logs.exp().to(logits.dtype)


def surprise_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    powers = (logits.float() - logits.float().amax(-1, keepdim=True)).exp()
    return powers.sum(-1).log(), powers.sum(-1)


def surprise_and_powers(logits: Tensor) -> tuple[Tensor, Tensor]:
    powers = (logits.float() - logits.float().amax(-1, keepdim=True)).exp()
    return powers.sum(-1).log(), powers


def test_a_long_sum_below_a_logarithm_adds_quick_exponentials() -> None:
    assert "libdevice.exp(" not in (long := text(surprise, LONG))
    assert long.count("tl.exp2(") == 1
    assert "libdevice.exp(" in text(surprise, 512)


def test_its_exponentials_are_shared_with_a_rounded_gradient() -> None:
    both = text(surprise_and_gradient, LONG)
    assert both.count("exp2(") == 1
    assert "libdevice.exp(" not in both


@pytest.mark.parametrize("function", [surprise_and_sum, surprise_and_powers])
def test_exponentials_that_are_returned_too_are_exact(function: Callable[[Tensor], object]) -> None:
    exact = text(function, LONG)
    assert "libdevice.exp(" in exact
    assert "exp2(" not in exact


def test_a_long_row_that_only_folds_read_is_walked_once() -> None:
    assert "for r0" not in text(surprise, 16384)
    assert "for r0" in text(surprise, 20000)
    assert "gl.allocate_shared_memory" in text(surprise_and_gradient, 20000)
    assert "for r0" not in text(lambda logits: logits.float().sum(-1), 20000)
