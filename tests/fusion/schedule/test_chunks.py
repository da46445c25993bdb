"""Products too large to keep are computed some rows at a time, with all their readers, forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.backend import Backend
from fusion.codegen.c.target import CTarget
from fusion.compilation.autograd import aot_backend
from fusion.compilation.compile import compile_graph
from fusion.inspect.report import Report
from fusion.lowering.interpret.chunks import Body
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Buffer, Program
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.runtime.chunks import InChunks
from tests.fusion.capabilities import of_everything

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BATCH, LENGTH, WIDTH, WORDS = 4, 70, 260, 1003
WORKSPACE = 1 << 17
"""Bytes: a fraction of the logits, and no divisor of any size."""


def cross_entropy(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).view(-1, WORDS), t.view(-1))


def summed(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((x.view(-1, WIDTH) @ w.T).float(), t.view(-1), reduction="sum") / 7


def smoothed(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).view(-1, WORDS), t.view(-1), label_smoothing=0.1)


def with_z_loss(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w).float().view(-1, WORDS)
    z = torch.logsumexp(logits, -1)
    return F.cross_entropy(logits, t.view(-1)) + 1e-3 * (z * z).mean()


def capped(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = torch.tanh(F.linear(x, w) / 30) * 30  # still in batches
    return F.cross_entropy(logits.view(-1, WORDS).float(), t.view(-1))


def by_hand(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w).view(-1, WORDS).float()
    top = logits.amax(-1, keepdim=True).detach()
    total = torch.log(torch.exp(logits - top).sum(-1)) + top[:, 0]
    return (total - logits.gather(1, t.view(-1).clamp(min=0)[:, None])[:, 0]).mean()


def biased(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w).float() + w.float().mean(-1)  # a gradient that is a sum over rows
    return F.cross_entropy(logits.view(-1, WORDS), t.view(-1))


def contrastive(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    a = F.normalize(x.view(-1, WIDTH), dim=-1)
    b = F.normalize(w[: len(a)], dim=-1)
    return F.cross_entropy(a @ b.T * 10, torch.arange(len(a)))


def after_a_layer(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return cross_entropy(torch.tanh(x @ w[:WIDTH]), w, t)  # its gradient goes on


def row_by_row(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(F.linear(x, w).view(-1, WORDS), t.view(-1), reduction="none")
    return (each * each).sum() / len(each)


def with_neighbours(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, WIDTH)
    return F.cross_entropy(F.linear(rows, w) + rows.roll(1, 0).sum(-1, keepdim=True), t.view(-1))


def shifted(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w).float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), t[:, 1:].reshape(-1))


def shifted_labels(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = (x @ w.T).float()
    after = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), after.view(-1), ignore_index=-100)


def without_the_last(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits = torch.tanh(F.linear(torch.tanh(x * 2)[:, :-1], w) / 3) * 3  # read before the product
    return F.cross_entropy(logits.reshape(-1, WORDS), t[:, 1:].reshape(-1))


CHUNKED: list[Loss] = [
    *(cross_entropy, summed, smoothed, with_z_loss, capped, by_hand, biased),
    *(contrastive, after_a_layer, row_by_row, with_neighbours, shifted, shifted_labels, without_the_last),
]


def both_ways(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    a, b = F.normalize(x.view(-1, WIDTH), dim=-1), F.normalize(w[: BATCH * LENGTH], dim=-1)
    scores, y = a @ b.T * 10, torch.arange(len(a))
    return (F.cross_entropy(scores, y) + F.cross_entropy(scores.T, y)) / 2


def unreduced(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).view(-1, WORDS), t.view(-1), reduction="none")


class Squared(torch.autograd.Function):
    """The identity, with a gradient that is not linear in the incoming one."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # one gradient
        return gradient * gradient


def not_linear(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    each: torch.Tensor = Squared.apply(F.cross_entropy(F.linear(x, w).view(-1, WORDS), t.view(-1)))
    return each


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(dtype)
    w = (torch.randn(WORDS, WIDTH, generator=generator) * 0.1).to(dtype)
    t = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    t[1, 5:9] = -100
    return x, w, t


def run(loss: Loss, dtype: torch.dtype, given: torch.dtype, scale: float = 3.0) -> list[torch.Tensor]:
    """Return the loss and the gradients of x and w, for inputs of dtype `given`, computed in `dtype`."""
    x, w, t = inputs(given)
    x, w = (each.to(dtype).requires_grad_() for each in (x, w))
    result = loss(x, w, t)
    (result * scale).sum().backward()
    assert x.grad is not None and w.grad is not None
    return [result.detach(), x.grad, w.grad]


def compiled(loss: Loss, workspace: int = WORKSPACE) -> tuple[Loss, list[Report]]:
    backend = Backend(Options(strict=True, workspace=workspace))
    return torch.compile(loss, backend=backend, dynamic=False), backend.reports


def check(loss: Loss, fused: Loss, dtype: torch.dtype) -> None:
    """Errors are no larger than twice eager's own."""
    want, eager, got = run(loss, torch.float64, dtype), run(loss, dtype, dtype), run(fused, dtype, dtype)
    floor = 8 * torch.finfo(torch.float32).eps
    for exact, theirs, ours in zip(want, eager, got, strict=True):
        allowed = 2 * (theirs.double() - exact).norm() + floor * exact.norm()
        assert (ours.double() - exact).norm() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", CHUNKED, ids=lambda loss: loss.__name__)
def test_loss_of_a_large_product_runs_in_chunks(loss: Loss, dtype: torch.dtype) -> None:
    fused, reports = compiled(loss)
    check(loss, fused, dtype)
    assert any("rows at a time" in note for note in reports[0].notes)


@pytest.mark.parametrize("loss", CHUNKED[:4], ids=lambda loss: loss.__name__)
def test_chunks_without_gradients(loss: Loss) -> None:
    fused, reports = compiled(loss)
    x, w, t = inputs(torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(fused(x, w, t), loss(x, w, t))
    assert any("rows at a time" in note for note in reports[0].notes)


def test_backward_only_scales_gradients_from_forward() -> None:
    fused, reports = compiled(cross_entropy)
    run(fused, torch.float32, torch.float32)
    (backward,) = [report for report in reports if report.label == "backward"]
    assert {extern.name for extern in backward.externs} == {"take_over"}
    largest = max(kernel.bytes_read for kernel in backward.kernels)
    assert largest <= 2 * 4 * WIDTH * (WORDS + BATCH * LENGTH)


def test_nothing_as_large_as_the_product_is_moved_at_once() -> None:
    fused, reports = compiled(cross_entropy)
    run(fused, torch.float32, torch.float32)
    assert reports[0].kernels
    assert all(kernel.bytes_written < 4 * WORDS * BATCH * LENGTH * 2 for kernel in reports[0].kernels)


@pytest.mark.parametrize(("alignment", "step"), [(1, WORDS), (16, 1024)])
def test_rows_have_gaps_only_where_the_library_asks_for_aligned_rows(
    alignment: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written into the gaps, and the library of a CPU may read the memory there."""
    capabilities = replace(CTarget().capabilities, alignment=alignment)
    monkeypatch.setattr(CTarget, "capabilities", property(lambda target: capabilities))
    actual: list[Chunked[Program]] = []

    class Seen(InChunks):
        def __init__(self, chunks: Chunked[Program], results: Sequence[Buffer], bodies: Sequence[Body]) -> None:
            actual.append(chunks)
            super().__init__(chunks, results, bodies)

    monkeypatch.setattr("fusion.runtime.splice.InChunks", Seen)
    fused, _ = compiled(cross_entropy)
    check(cross_entropy, fused, torch.float32)
    buffers = [buffer for chunks in actual for body in chunks.bodies for buffer in body.buffers.values()]
    rows = {max(buffer.strides) for buffer in buffers if len(buffer.shape) == 2 and WORDS in buffer.shape}
    assert {size for size in rows if size >= WORDS} == {step}


def test_results_of_a_chunk_are_gone_before_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    actual: list[weakref.ref[torch.Tensor]] = []
    gone: list[bool] = []

    def watched(body: Body) -> Body:
        def run(args: list[object]) -> tuple[torch.Tensor, ...]:
            gone.extend(tensor() is None for tensor in actual)
            results = body(args)
            actual[:] = map(weakref.ref, results)
            return results

        return run

    class Watched(InChunks):
        def __init__(self, chunks: Chunked[Program], results: Sequence[Buffer], bodies: Sequence[Body]) -> None:
            super().__init__(chunks, results, [watched(body) for body in bodies])

    monkeypatch.setattr("fusion.runtime.splice.InChunks", Watched)
    fused, _ = compiled(cross_entropy)
    run(fused, torch.float32, torch.float32)
    assert gone and all(gone)


@pytest.mark.parametrize("loss", [both_ways, unreduced, not_linear], ids=lambda loss: loss.__name__)
def test_losses_that_cannot_be_chunked_are_right(loss: Loss) -> None:
    fused, reports = compiled(loss)
    check(loss, fused, torch.float32)
    assert not any("rows at a time" in note for report in reports for note in report.notes)


def test_gradients_are_ahead_and_right_without_chunks_too() -> None:
    """With loss and gradient in one graph, clusters of both interleave, and none may depend on itself."""
    kept_whole = Options(strict=True, workspace=1 << 40)
    labels: list[str] = []

    def compile_one(graph: torch.fx.GraphModule, label: str) -> Boxed:
        compiled, report = compile_graph(graph, kept_whole, label)
        assert not report.notes
        labels.append(label)
        return compiled

    def as_batches(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w).float().view(-1, WORDS), t.view(-1))

    backend = aot_backend(compile_one, of_everything, WORKSPACE)
    check(as_batches, torch.compile(as_batches, backend=backend, dynamic=False), torch.bfloat16)
    assert labels == ["forward", "backward"]


def test_float16_keeps_the_scale_of_its_loss() -> None:
    fused, _ = compiled(summed)
    exact = run(summed, torch.float64, torch.float16, 2.0**12)
    ours = run(fused, torch.float16, torch.float16, 2.0**12)
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b).norm() <= 4e-3 * b.norm()


def test_returned_logits_are_not_chunked() -> None:
    def both(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(x, w)
        return F.cross_entropy(logits.view(-1, WORDS), t.view(-1)), logits

    backend = Backend(Options(strict=True, workspace=WORKSPACE))
    x, w, t = inputs(torch.float32)
    x.requires_grad_()
    got, want = torch.compile(both, backend=backend, dynamic=False)(x, w, t), both(x, w, t)
    torch.testing.assert_close(got, want)
    (gradient,) = torch.autograd.grad(got[0] + got[1].sum(), x)
    (expected,) = torch.autograd.grad(want[0] + want[1].sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_gradients_can_be_taken_twice() -> None:
    fused, _ = compiled(cross_entropy)
    x, w, t = inputs(torch.float32)
    x.requires_grad_()
    result = fused(x, w, t)
    first = torch.autograd.grad(result, x, retain_graph=True)[0].clone()
    second = torch.autograd.grad(result, x)[0]
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def saved_by(loss: Loss, keep: list[torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the loss of x, x, and the addresses of all tensors saved for backward, which are added to `keep`."""
    x, w, t = inputs(torch.float32)
    x.requires_grad_()
    places: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        places.append(tensor.data_ptr())
        if keep is not None:
            keep.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = loss(x, w, t)
    return result, x, places


def test_gradients_are_scaled_in_place() -> None:
    fused, _ = compiled(cross_entropy)
    result, x, places = saved_by(fused, None)
    (gradient,) = torch.autograd.grad(result * 3, x)
    assert gradient.data_ptr() in places
    want, y, _ = saved_by(cross_entropy, None)
    torch.testing.assert_close(gradient, torch.autograd.grad(want * 3, y)[0])


def test_gradients_that_somebody_holds_are_scaled_elsewhere() -> None:
    fused, _ = compiled(cross_entropy)
    held: list[torch.Tensor] = []
    result, x, places = saved_by(fused, held)
    before = [tensor.clone() for tensor in held]
    (gradient,) = torch.autograd.grad(result * 3, x)
    assert gradient.data_ptr() not in places
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(tensor, old)


def test_a_large_enough_workspace_avoids_chunks() -> None:
    fused, reports = compiled(cross_entropy, 1 << 30)
    check(cross_entropy, fused, torch.float32)
    assert not reports[0].notes


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("loss", [cross_entropy, biased, shifted], ids=lambda loss: loss.__name__)
def test_one_compilation_serves_chunks_of_any_number_of_rows(loss: Loss, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    backend = Backend(Options(strict=True, workspace=WORKSPACE))
    fused = torch.compile(loss, backend=backend, dynamic=dynamic)
    generator = torch.Generator().manual_seed(7)
    for batch, length in ((4, 70), (3, 90), (2, 33), (5, 7)):  # of other sizes, and less than a chunk
        t = torch.randint(0, WORDS, (batch, length), generator=generator)
        given = [torch.randn(*s, generator=generator) * 0.3 for s in ((batch, length, WIDTH), (WORDS, WIDTH))]
        outcomes: list[list[torch.Tensor]] = []
        for program, dtype in ((fused, torch.float32), (loss, torch.float32), (loss, torch.float64)):
            x, w = (each.to(dtype, copy=True).requires_grad_() for each in given)
            outcomes.append([program(x, w, t), *torch.autograd.grad(program(x, w, t), (x, w))])
        for ours, theirs, exact in zip(*outcomes, strict=True):
            assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-6 * exact.norm()
    assert len(backend.reports) == (2 if dynamic else 4)  # forward and backward of each compilation
    assert all(any("rows at a time" in note for note in r.notes) for r in backend.reports if r.label == "forward")
