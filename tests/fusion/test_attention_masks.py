"""Masks of attention that say nothing of their own are dropped; what the others hide is priced as it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import fx
from torch._functorch import config

import fusion
from fusion.attention import Choice
from fusion.codegen.target import Target
from fusion.codegen.targets import TARGETS
from fusion.compilation.autograd import aot_backend
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.attention import attention
from fusion.lowering.ir.program import writes
from fusion.runtime import Boxed
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall
from tests.fusion.agreement import assert_as_eager
from tests.fusion.test_sdpa import Chosen, Program, causal, operands, plain, window


@pytest.fixture
def chosen() -> Iterator[Chosen]:
    torch._dynamo.reset()
    yield Chosen()
    torch._dynamo.reset()


def everything(rows: int, columns: int) -> torch.Tensor:
    """What a model of both directions computes for a batch without padding; PyTorch's fused kernels refuse strides of
    0.
    """
    return (torch.arange(rows)[:, None] >= 0).expand(1, 1, rows, columns)


SETTLED: dict[str, tuple[Callable[[int, int], torch.Tensor], Program]] = {
    "everything": (everything, plain),
    "ones": (lambda rows, columns: torch.ones(rows, columns, dtype=torch.bool), plain),
    "zeros": (lambda rows, columns: torch.zeros(rows, columns), plain),
    "long before": (lambda rows, columns: torch.arange(columns)[None] < columns + 5, plain),
    "lower triangle": (lambda rows, columns: torch.ones(rows, columns, dtype=torch.bool).tril(), causal),
    "comparison": (lambda rows, columns: torch.arange(columns) <= torch.arange(rows)[:, None], causal),
    "negated": (lambda rows, columns: ~(torch.arange(columns) > torch.arange(rows)[:, None])[None], causal),
    "infinities": (lambda rows, columns: torch.full((rows, columns), float("-inf")).triu(1), causal),
}
KEPT: dict[str, Callable[[int, int], torch.Tensor]] = {
    "later": lambda rows, columns: torch.ones(rows, columns, dtype=torch.bool).tril(1),
    "upper triangle": lambda rows, columns: torch.ones(rows, columns, dtype=torch.bool).triu(),
    "finite": lambda rows, columns: torch.full((rows, columns), -1e4).triu(1),
    "one hidden": lambda rows, columns: torch.arange(columns)[None] < columns - 1,
    "one row": lambda rows, columns: torch.arange(columns)[None] <= 0,
}


def with_mask(mask: Callable[[int, int], torch.Tensor]) -> Program:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[-2], k.shape[-2]))

    return program


@pytest.mark.parametrize("columns", [517, 333])
@pytest.mark.parametrize("name", SETTLED)
def test_masks_that_say_nothing_of_their_own_are_dropped(name: str, columns: int, chosen: Chosen) -> None:
    """The call is priced as, and is, one without a mask."""
    mask, equivalent = SETTLED[name]
    inputs = operands(columns=columns)
    results = [torch.compile(program, backend=chosen)(*inputs) for program in (with_mask(mask), equivalent)]
    settled, plainly = chosen.choices
    assert replace(settled, origin=plainly.origin) == plainly
    assert torch.equal(*results)
    exact = with_mask(mask)(*(x.double() for x in inputs)) if name != "zeros" else plain(*(x.double() for x in inputs))
    assert_as_eager(results[0], with_mask(mask)(*inputs), exact)


@pytest.mark.parametrize("name", KEPT)
def test_other_masks_stay(name: str, chosen: Chosen) -> None:
    results = [torch.compile(program, backend=chosen)(*operands()) for program in (with_mask(KEPT[name]), plain)]
    assert not torch.equal(*results)


def test_a_mask_that_needs_no_padding_at_one_size_only_stays(chosen: Chosen) -> None:
    """Sizes that vary are numbers while a call is priced; what holds for these alone is not settled."""

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[-2])[None] < 517)

    compiled = torch.compile(program, backend=chosen, dynamic=True)
    for columns in (517, 640):
        inputs = operands(columns=columns)
        assert_as_eager(compiled(*inputs), program(*inputs), program(*(x.double() for x in inputs)))


def test_attention_of_both_directions_on_a_gpu() -> None:
    """No scores in memory, and no mask: where the library is not faster, one kernel without a load of it."""
    inputs = [torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16) for _ in range(3)]
    export = fusion.export_kernels(with_mask(everything), *inputs, arch="sm_90")
    (kernel,) = export.kernels
    assert not any("scaled_dot_product" in step or "mm" in step for step in export.steps), export.steps
    assert "in3" not in kernel.text and "bool" not in kernel.text


# Scores in memory -----------------------------------------------------------------------------------------------------


def decomposed(program: Program, inputs: Sequence[torch.Tensor], target: Target) -> tuple[Choice, list[Schedule]]:
    """Return the choice for the one call of a program, and the schedules of its decomposition."""
    choices: list[Choice] = []
    schedules: list[Schedule] = []

    def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
        schedules.append(schedule_graph(graph, target, Trace(None, label))[1])
        return lambda args: ()

    def backend(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        whole, chooser = graph.forward, Chosen()
        chooser.chooser._target_of = lambda device: target
        choices.extend(chooser.chooser(graph))
        for node in graph.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                node.target = attention
        graph.recompile()
        with config.patch(force_non_lazy_backward_lowering=True):
            aot_backend(compile_one, lambda device: target.capabilities)(graph, inputs)
        return whole

    torch._dynamo.reset()
    torch.compile(program, backend=backend)(*inputs)
    return choices[0], schedules


@pytest.mark.parametrize("name", ["triton", "c"])
@pytest.mark.parametrize(
    ("dtype", "width", "training"),
    [
        (torch.bfloat16, 64, True),
        (torch.float32, 64, True),
        (torch.float32, 16, True),
        (torch.float32, 64, False),
        (torch.float32, 128, False),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_what_would_store_the_scores_is_refused(dtype: torch.dtype, width: int, training: bool, name: str) -> None:
    """The price of a call knows without a schedule whether the scheduler chains its products."""
    target = TARGETS[name]("sm_90") if name == "triton" else TARGETS[name]()
    inputs = [torch.empty(2, 8, 1024, width, dtype=dtype, requires_grad=training) for _ in range(3)]
    choice, schedules = decomposed(window, inputs, target)
    stored = [
        buffer
        for schedule in schedules
        for step in schedule.steps
        for buffer in (step.written if isinstance(step, KernelCall) else writes(step))
        if schedule.program.buffers[buffer].numel >= 16 * 1024 * 1024
    ]
    assert ("scores" in choice.reason) is bool(stored), (str(choice), stored)
    assert choice.generated is not bool(stored)
