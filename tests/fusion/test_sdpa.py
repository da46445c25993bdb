"""`F.scaled_dot_product_attention`: which kernels compute it, and that its decomposition in one kernel equals eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import fx
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.attention import Choice, Chooser, choose
from fusion.attention.call import Call
from fusion.backend import Backend
from fusion.codegen.c.target import CTarget
from fusion.codegen.target import Target
from fusion.codegen.targets import TARGETS
from fusion.compilation.autograd import aot_backend
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.attention import attention
from fusion.lowering.ir.kernel import Kernel, Loop
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.schedule.kernels import KernelCall
from tests.fusion.agreement import assert_as_eager, error
from tests.fusion.capabilities import of_everything

Program = Callable[..., torch.Tensor]
STRICT = {"target": "c", "strict": True}


# Programs -------------------------------------------------------------------------------------------------------------


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def triangle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i, j = torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (i - j < 100))


def alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i, j = torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)
    slopes = torch.exp2(-torch.arange(1, q.shape[1] + 1, device=q.device))[:, None, None]
    bias = torch.where(j <= i, slopes * (j - i), float("-inf")).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def operands(
    heads: int = 2, rows: int = 517, columns: int = 517, width: int = 40, out: int = 40, keys: int | None = None
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, rows, width), (1, keys or heads, columns, width), (1, keys or heads, columns, out))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def some(dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """A mask of [517, 517] that masks two rows entirely."""
    kept = torch.rand(517, 517, generator=torch.Generator().manual_seed(1)) > 0.3
    kept[3], kept[516] = False, False
    return kept if dtype is torch.bool else torch.zeros(517, 517).masked_fill(~kept, float("-inf")).to(dtype)


# Values ---------------------------------------------------------------------------------------------------------------


def with_library(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Make the library's attention reach `share` of its speed of GEMMs, and generated attention all of it."""
    monkeypatch.setattr(CTarget, "chained_share", lambda target, chain, name="": share if name in LIBRARY else 1.0)


LIBRARY = ("flash", "math", "efficient")


@pytest.fixture
def slow_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch, 1e-4)


CASES: dict[str, tuple[Program, tuple[torch.Tensor, ...]]] = {
    "plain": (plain, operands()),
    "cross, uneven widths": (plain, operands(rows=333, columns=900, out=24)),
    "causal": (causal, operands()),
    "causal, more rows": (causal, operands(rows=900, columns=333)),
    "grouped": (grouped, operands(heads=4, keys=2, width=32, out=32)),
    "bool": (masked, (*operands(), some())),
    "float": (masked, (*operands(), some(torch.float32))),
    "per head": (masked, (*operands(), torch.randn(1, 2, 517, 517, generator=torch.Generator().manual_seed(2)))),
    "one row": (masked, (*operands(), torch.arange(517)[None] % 3 > 0)),
    "triangle": (triangle, operands()),
    "window": (window, operands()),
    "alibi": (alibi, operands()),
    "three dimensions": (causal, tuple(x[0] for x in operands())),
    "other layout": (causal, tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands())),
}
WHAT = [(name, torch.float32) for name in CASES]
WHAT += [(name, torch.bfloat16) for name in ("causal", "grouped", "bool", "float", "alibi")]


@pytest.mark.usefixtures("slow_library")
@pytest.mark.parametrize(("name", "dtype"), WHAT, ids=lambda value: str(value).removeprefix("torch."))
def test_values(name: str, dtype: torch.dtype) -> None:
    program, inputs = CASES[name]
    inputs = tuple(x if x.dtype is torch.bool else x.to(dtype) for x in inputs)
    torch._dynamo.reset()
    backend = Backend(Options.read(options=STRICT))
    got = torch.compile(program, backend=backend)(*inputs)
    (report,) = backend.reports
    assert "generated" in str(report) and not report.externs
    scores = inputs[0].numel() // inputs[0].shape[-1] * inputs[1].shape[-2]
    assert all(kernel.bytes_written < scores * dtype.itemsize for kernel in report.kernels), str(report)
    exact = program(*(x if x.dtype is torch.bool else x.double() for x in inputs))
    assert not exact.isnan().any()
    assert_as_eager(got, program(*inputs), exact)


@pytest.mark.parametrize("name", ["grouped", "float", "window"])
def test_gradients_of_the_parts(name: str) -> None:
    """As compiled for training; fully masked rows are left out."""
    program, inputs = CASES[name]

    def step(function: Program, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        out = function(*leaves, *inputs[3:])
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
        return torch.autograd.grad(out, leaves, weights)

    def parts(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        (call,) = (node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention)
        call.target = attention
        graph.recompile()
        return Backend(Options.read(options=STRICT))(graph, inputs)

    torch._dynamo.reset()
    got, eager = step(torch.compile(program, backend=parts), *inputs), step(program, *inputs)
    exact = step(program, *(x.double() for x in inputs))
    for mine, theirs, true in zip(got, eager, exact, strict=True):
        assert error(mine, true) <= 2 * error(theirs, true) + 1e-6 * float(true.abs().max())


@pytest.mark.usefixtures("slow_library")
def test_under_autocast() -> None:
    inputs = operands()
    with torch.autocast("cpu", torch.bfloat16):
        got = fusion.fuse(causal, options=STRICT)(*inputs)
        eager = causal(*inputs)
    assert got.dtype is eager.dtype is torch.bfloat16 and got.stride() == eager.stride()
    assert_as_eager(got, eager, causal(*(x.double() for x in inputs)))


@pytest.mark.usefixtures("slow_library")
def test_sizes_that_vary() -> None:
    torch._dynamo.reset()
    backend = Backend(Options.read(options=STRICT))
    fused = torch.compile(window, backend=backend, dynamic=True)
    for rows in (517, 640):
        inputs = operands(rows=rows, columns=rows)
        assert_as_eager(fused(*inputs), window(*inputs), window(*(x.double() for x in inputs)))
    (report,) = backend.reports
    assert "generated" in str(report) and not report.externs


@pytest.mark.usefixtures("slow_library")
def test_dropout_in_inference_is_drawn_in_the_loop() -> None:
    def dropping(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    inputs = operands()
    explanation = fusion.explain(dropping, options=STRICT)(*inputs)
    assert not any(kernel.bytes_written >= 2 * 517 * 517 for kernel in explanation.kernels), str(explanation)
    fused = fusion.fuse(dropping, options=STRICT)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(fused(*inputs))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    mean, exact = torch.stack([fused(*inputs) for _ in range(30)]).mean(0), plain(*inputs)
    assert float((mean - exact).abs().mean()) < 0.3 * float((results[0] - exact).abs().mean())


# The choice -----------------------------------------------------------------------------------------------------------


class Chosen:
    """A Dynamo backend that chooses for a GPU, and runs the graph eagerly, or returns results that nobody looks at."""

    def __init__(self, *, runs: bool = True) -> None:
        self.runs = runs
        self.choices: list[Choice] = []
        self.chooser = Chooser(lambda device: TARGETS["triton"]("sm_90"))

    def __call__(self, graph: fx.GraphModule, inputs: object) -> Callable[..., object]:
        self.choices.extend(self.chooser(graph))
        (results,) = graph.graph.output_node().args
        return graph.forward if self.runs else lambda *_: results

    @property
    def only(self) -> Choice:
        (choice,) = self.choices
        return choice


@pytest.fixture
def chosen() -> Iterator[Chosen]:
    torch._dynamo.reset()
    yield Chosen(runs=False)
    torch._dynamo.reset()


def large(dtype: torch.dtype = torch.bfloat16, width: int = 64, *, training: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(dtype).requires_grad_(training) for x in operands(8, 1024, 1024, width, width))


@pytest.mark.parametrize(("program", "training"), [(plain, False), (plain, True), (causal, True)])
def test_the_library_keeps_the_calls_it_is_faster_at(program: Program, training: bool, chosen: Chosen) -> None:
    torch.compile(program, backend=chosen)(*large(training=training))
    choice = chosen.only
    assert not choice.generated and choice.kernel == "flash" and not choice.reason
    assert choice.library_us is not None and choice.generated_us is not None
    assert 0 < choice.library_us <= choice.generated_us


MATH: dict[str, tuple[torch.Tensor, ...]] = {
    "mask of stride 0": (*large(), torch.ones(1, 1, 1024, 1, dtype=torch.bool).expand(-1, -1, -1, 1024)),
    "three dimensions": tuple(x[0] for x in large()),
    "transposed": tuple(x.mT.contiguous().mT for x in large()),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MATH)
def test_what_the_library_has_no_kernel_for_is_generated(name: str, training: bool, chosen: Chosen) -> None:
    """PyTorch would write the scores in float32: the price of its products, and of the scores in memory."""
    inputs = [x.detach().requires_grad_(training and x.is_floating_point()) for x in MATH[name]]
    torch.compile(plain if len(inputs) == 3 else masked, backend=chosen)(*inputs)
    choice = chosen.only
    assert choice.generated and choice.kernel == "math", str(choice)
    assert choice.library_us is not None and choice.generated_us is not None
    assert choice.generated_us < choice.library_us / 4
    scores, bandwidth = 8 * 1024 * 1024 * 4, TARGETS["triton"]("sm_90").capabilities.rates.bandwidth
    assert choice.library_us > 4 * scores / bandwidth


def test_a_mask_with_a_gradient_is_generated_if_the_library_stores_its_scores_in_float32(chosen: Chosen) -> None:
    mask = torch.randn(8, 1024, 1024).bfloat16().requires_grad_()
    torch.compile(masked, backend=chosen)(*(x.detach()[0].requires_grad_() for x in large()), mask)
    choice = chosen.only
    assert choice.generated and choice.kernel == "math", str(choice)
    scores, bandwidth = 8 * 1024 * 1024 * 2, TARGETS["triton"]("sm_90").capabilities.rates.bandwidth
    assert choice.generated_us is not None and choice.generated_us > 3 * scores / bandwidth, "backward stores them"


@pytest.mark.parametrize("scale", [0.0, 0.3, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_a_mask(dtype: torch.dtype, scale: float | None) -> None:
    """Of a table whose heads are neighbours in memory, and of one row for all queries, repeated for the batch."""
    q, k, v = (x.to(dtype).requires_grad_() for x in operands(3, 60, 70, 16, 16))
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(60, 70, 3, generator=generator).to(dtype).requires_grad_()
    row = torch.randn(1, 1, 1, 70, generator=generator).to(dtype).requires_grad_()

    def step(function: Callable[..., torch.Tensor], mask: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        given = (x.to(mask.dtype) for x in (q, k, v))
        out = function(*given, attn_mask=mask, scale=scale)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
        (gradient,) = torch.autograd.grad(out, [leaf], weights)
        return gradient

    for mask, leaf in ((table.permute(2, 0, 1)[None], table), (row.expand(1, 3, 60, 70), row)):
        got, exact = step(attention, mask, leaf), step(F.scaled_dot_product_attention, mask.double(), leaf).double()
        assert got.shape == leaf.shape
        assert float((got.double() - exact).norm()) < 4 * torch.finfo(dtype).eps * float(exact.norm())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("program", [window, alibi])
def test_masks_that_are_computed_are_generated(program: Program, training: bool, chosen: Chosen) -> None:
    torch.compile(program, backend=chosen)(*large(training=training))
    assert chosen.only.generated and chosen.only.kernel == "efficient", str(chosen.only)


def test_a_computed_mask_skips_blocks(chosen: Chosen) -> None:
    """The hidden blocks of a mask that is computed from indices are known; those of a tensor are not."""
    for program in (alibi, window):
        torch.compile(program, backend=chosen)(*large())
    torch.compile(masked, backend=chosen)(*large(), torch.ones(1024, 1024, dtype=torch.bool))
    halved, narrow, whole = (choice.generated_us for choice in chosen.choices)
    assert narrow < halved < whole


def test_calls_alike_are_priced_once(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[object] = []
    inner = choose.generated_time

    def counting(call: Call, kernel: str, target: Target) -> float:
        priced.append(call)
        return inner(call, kernel, target)

    monkeypatch.setattr(choose, "generated_time", counting)

    def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            q = window(q, k, v)
        return q

    torch.compile(layers, backend=chosen)(*large())
    assert len(chosen.choices) == 3 and all(choice.generated for choice in chosen.choices) and len(priced) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_single_query_of_16_bits_is_generated_on_a_cpu(dtype: torch.dtype) -> None:
    """One token attends to a cache: the library takes many times as long as reading keys and values of 16 bits does."""
    torch._dynamo.reset()
    inputs = (
        *(x.to(dtype) for x in (torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 2, 256, 64))),
        torch.arange(256) < 99,
    )

    def decoding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask[None], enable_gqa=True)

    fused = fusion.fuse(decoding, options=STRICT)
    with torch.no_grad():
        exact = decoding(*(x.double() if x.is_floating_point() else x for x in inputs))
        assert error(fused(*inputs), exact) <= 2 * error(decoding(*inputs), exact)
    (graph,) = fusion.report(fused).graphs
    assert graph.kernels and not graph.externs and "generated" in graph.notes[0]
    longer = tuple(x.to(dtype) for x in (torch.randn(1, 8, 2, 64), *torch.randn(2, 1, 8, 256, 64)))
    with torch.no_grad():
        fused = fusion.fuse(plain, options=STRICT)
        fused(*longer)
    assert not fusion.report(fused).graphs[0].kernels


def test_attention_that_would_store_its_scores_is_left_to_the_library(chosen: Chosen) -> None:
    """Few scores are not worth a loop over tiles; stored, they are not worth leaving the library's kernel."""
    torch.compile(masked, backend=chosen)(*(x.bfloat16() for x in operands(1, 64, 64)), some()[:64, :64])
    assert not chosen.only.generated and chosen.only.reason


def test_refusals_are_named(chosen: Chosen) -> None:
    def dropping(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    torch.compile(dropping, backend=chosen)(*large(training=True))
    torch.compile(plain, backend=chosen)(*large(torch.float64))
    dropped, double = chosen.choices
    assert not dropped.generated and "drop" in str(dropped)
    assert not double.generated and "float64" in str(double)


@pytest.mark.parametrize("program", [window, alibi])
def test_chosen_attention_runs_forward_and_backward(program: Program, chosen: Chosen) -> None:
    results = []
    chosen.runs = True
    for function in (torch.compile(program, backend=chosen), program):
        leaves = [x.bfloat16().requires_grad_() for x in operands(2, 1024, 1024, 64, 64)]
        leaves = leaves if function is not program else [x.detach().double().requires_grad_() for x in leaves]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.double().square().sum(), leaves)))
    assert chosen.only.generated
    for mine, exact in zip(*results, strict=True):
        assert float((mine.double() - exact).norm()) < 0.03 * float(exact.norm())


def test_a_checkpointed_region_keeps_the_library(chosen: Chosen) -> None:
    """Its backward recomputes all of forward, which the price does not include; without gradients there is none."""

    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(window, q, k, v, use_reentrant=False)

    for training in (True, False):
        torch.compile(region, backend=chosen)(*large(training=training))
    trained, ran = chosen.choices
    assert not trained.generated and "checkpoint" in str(trained)
    assert ran.generated


def test_under_vmap_it_is_not_asked_for(chosen: Chosen) -> None:
    """A call that is mapped over a dimension is one of more dimensions than its arguments show."""
    inputs = tuple(x.expand(3, *x.shape) for x in operands())
    chosen.runs = True
    got = torch.compile(torch.vmap(causal), backend=chosen)(*inputs)
    torch.testing.assert_close(got, causal(*inputs))
    assert chosen.only.reason == "the result is not a plain tensor"


def test_ahead_of_time() -> None:
    inputs = (*large(), torch.ones(1024, 1024, dtype=torch.bool))
    export = fusion.export_kernels(masked, *inputs, arch="sm_90")
    assert export.kernels and all(kernel.artefacts["cubin"] for kernel in export.kernels)
    assert not any("scaled_dot_product" in step or "mm." in step for step in export.steps)
    (step,) = fusion.export_kernels(plain, *large(), arch="sm_90").steps
    assert "scaled_dot_product" in step


def test_both_kernels_of_backward_skip() -> None:
    """Forward, and the gradients of the queries and of keys and values, loop only over visible blocks."""
    target = TARGETS["triton"]("sm_90")
    results: list[Kernel] = []

    def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
        _, schedule = schedule_graph(graph, target, Trace(None, label))
        results.extend(step.kernel for step in schedule.steps if isinstance(step, KernelCall))
        return lambda args: ()

    graph = fx.Graph()
    graph.output((graph.call_function(attention, tuple(map(graph.placeholder, "qkv")), {"is_causal": True}),))
    module = fx.GraphModule({}, graph)
    with config.patch(force_non_lazy_backward_lowering=True):
        aot_backend(compile_one, of_everything)(module, large(training=True))
    loops = [stmt for kernel in results for stmt in kernel.body if isinstance(stmt, Loop)]
    assert len(loops) == 3 and all(loop.where is not None for loop in loops)


def test_the_report_has_the_choice() -> None:
    torch._dynamo.reset()
    backend = Backend(Options.read(options=STRICT))
    inputs = operands(2, 517, 517)
    torch.compile(lambda q, k, v: plain(window(q, k, v), k, v), backend=backend)(*inputs)
    lines = [line for line in str(backend.reports[0]).splitlines() if "attention scaled_dot" in line]
    assert len(lines) == 2 and all("µs against" in line and "flash kernel" in line for line in lines)
