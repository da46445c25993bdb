"""Forms of kernels whose loop has several products: their reports and predicted times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.codegen.chained import GENERATED
from fusion.codegen.triton.devices import WARP_SPECIALISED
from fusion.codegen.tuning import Tuning
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.schedule.kernels import KernelCall
from fusion.schedule.kernels.time import kernel_time
from tests.fusion import attentions

pytest.importorskip("triton")

from fusion.codegen.triton import TritonTarget

TARGET = TritonTarget("sm_90")
HEADS = (2, 8, 2048, 128)

Program = Callable[..., torch.Tensor]


def scheduled(
    program: Program, shape: tuple[int, ...], target: TritonTarget = TARGET
) -> tuple[KernelCall, list[Tuning]]:
    """Return the kernel with the loop over keys, and the alternatives that were priced for it."""
    given = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(3)]
    graph = make_fx(program, tracing_mode="fake")(*given)
    _, schedule = schedule_graph(graph, target, Trace(None, "forward"))
    (call,) = (step for step in schedule.steps if isinstance(step, KernelCall))
    return call, [tuning for tuning in schedule.choices if tuning.subject == call.kernel.name]


def test_both_forms_are_priced() -> None:
    call, (tuning,) = scheduled(attentions.plain, HEADS)
    specialised, other = tuning.trials
    assert (specialised.name, other.name, tuning.chosen) == (WARP_SPECIALISED, GENERATED, 0)
    assert specialised.predicted == kernel_time(call, TARGET) < other.predicted


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((2, 8, 2048, 32), "heads are 32 and 32 wide"),
        ((2, 8, 512, 128), "64 blocks of rows leave multiprocessors idle"),
        ((16, 8, 384, 128), "a loop of 384 is over before the ring is full"),
    ],
)
def test_the_report_says_why_a_form_was_refused(shape: tuple[int, ...], why: str) -> None:
    call, (tuning,) = scheduled(attentions.plain, shape)
    taken, refused = tuning.trials
    assert (taken.name, refused.name, tuning.chosen) == (GENERATED, WARP_SPECIALISED, 0)
    assert taken.predicted == kernel_time(call, TARGET) and why in str(refused)


def test_a_single_form_is_not_reported() -> None:
    _, tunings = scheduled(attentions.plain, HEADS, TritonTarget("sm_80"))
    assert not tunings


def priced(length: int, form: str) -> float:
    call, _ = scheduled(attentions.causal, (16384 // length, 16, length, 128))
    return kernel_time(call, TARGET, form) / call.flops


def test_short_loops_cost_more_per_operation() -> None:
    """The work of a block of rows before and after its loop does not depend on the length, and is more in groups."""
    assert priced(512, WARP_SPECIALISED) > 1.3 * priced(4096, WARP_SPECIALISED)
    ratios = [priced(length, GENERATED) / priced(length, WARP_SPECIALISED) for length in (512, 4096)]
    assert 1.0 < ratios[0] < ratios[1]
