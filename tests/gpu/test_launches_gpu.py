"""Launches on a device: one launcher for all sizes, unaligned tensors, streams, graphs, threads, other devices."""

from __future__ import annotations

import threading

import pytest
import sympy
import torch

pytest.importorskip("triton")

import fusion
from fusion.codegen.triton.launch import build as launching
from fusion.lowering.errors import BuildError
from tests.codegen.kernels.large import LARGE
from tests.codegen.kernels.making import BF16, F16, LOOP, assert_same, expected, tensors
from tests.codegen.kernels.pointwise import add
from tests.codegen.kernels.products import matmul, matmul_in_parts, matmul_top
from tests.codegen.kernels.rows import softmax, total
from tests.gpu.launched import build, check

pytestmark = pytest.mark.gpu


def test_symbolic_sizes_share_one_launcher() -> None:
    rows, columns = sympy.symbols("s0 s1", integer=True, positive=True)
    for kernel in (add(rows), softmax(rows, columns, LOOP), matmul(rows, 350, columns, F16)):
        launch = build(kernel)
        for sizes in ((5, 70), (64, 1024), (1, 1), (333, 2000)):
            known = dict(zip((rows, columns), sizes, strict=True))
            values = [known[size] for size in kernel.sizes]
            given = tensors(kernel, sizes=known)
            want = expected(kernel, given, values)
            got = [tensor.cuda() for tensor in given]
            launch(*got, *values)
            assert_same(kernel, [tensor.cpu() for tensor in got], want, factor=50)


def test_unaligned_tensors() -> None:
    """Views that start at any address: launched alternately with aligned ones, through pointers and through
    descriptors.
    """
    n = 1 << 20
    x, y, out = (torch.randn(n + 1, device="cuda") for _ in range(3))
    launch = build(add(n))
    for first, second, last in ((0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 1), (0, 0, 0)):
        given = x[first : n + first], y[second : n + second], out[last : n + last]
        launch(*given)
        torch.testing.assert_close(given[2], given[0] + given[1], rtol=0, atol=0)

    kernel = matmul(2048, 2048, 512, BF16, turned=(False, True))
    launch = build(kernel)
    memory = torch.randn(2048 * 512 + 8, device="cuda").to(BF16)
    c, out = torch.randn(1, 2048, 512, device="cuda").to(BF16), torch.empty(1, 2048, 2048, device="cuda", dtype=BF16)
    for start in (0, 1, 4, 8):
        a = memory[start : start + 2048 * 512].view(1, 2048, 512)
        launch(a, c, out)
        torch.testing.assert_close(out.float(), (a.float() @ c.float().transpose(1, 2)).relu(), rtol=2e-2, atol=2e-1)

    columns = sympy.Symbol("s1", integer=True, positive=True)
    launch = build(softmax(64, columns, LOOP))
    for start, width in ((0, 512), (1, 512), (3, 511)):
        x = torch.randn(64 * width + start, device="cuda")[start:].view(64, width)
        out = torch.empty_like(x)
        launch(x, out, width)
        torch.testing.assert_close(out, x.softmax(1))


def test_the_last_program_sees_the_stores_of_all() -> None:
    """Thousands of programs, one launch after another, on several streams at once, and in graphs."""
    n = 1 << 16
    launch = build(total(n, 8192))
    streams = [torch.cuda.Stream() for _ in range(4)]
    x = [torch.randint(-8, 8, (n,), device="cuda").float() for _ in streams]  # sums are exact
    parts, out = torch.empty(4, 8192, device="cuda"), torch.empty(4, 100, device="cuda")
    torch.cuda.synchronize()
    for step in range(100):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                x[k].add_(1.0)
                launch(x[k], parts[k], out[k, step])
    torch.cuda.synchronize()
    for k in range(4):
        after = x[k].sum() - n * torch.arange(99, -1, -1, device="cuda")
        torch.testing.assert_close(out[k], after, rtol=0, atol=0)

    graphs = [torch.cuda.CUDAGraph() for _ in streams]
    for k, graph in enumerate(graphs):  # all are captured on one stream, and replayed on several
        with torch.cuda.graph(graph):
            for step in range(10):
                launch(x[k], parts[k], out[k, step])
    for _ in range(20):
        out.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for k in range(4):
            assert bool((out[k, :10] == x[k].sum()).all())

    given = [tensor.cuda() for tensor in tensors(matmul_top(128, 128, 300))]
    build(matmul_top(128, 128, 300))(*given)
    torch.testing.assert_close(given[3], given[2].max())


def test_the_last_program_of_a_tile_sees_the_stores_of_all_its_parts() -> None:
    """The same bits each time, on several streams at once and in graphs: parts are added in their order."""
    kernel = matmul_in_parts(16, 512, 4096, 8)
    launch = build(kernel)
    x, w, result, out = (tensor.cuda() for tensor in tensors(kernel))
    want = (x.double() @ w.double().T).relu().half()
    launch(x, w, result, out)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-2)
    streams = [torch.cuda.Stream() for _ in range(4)]
    parts, outs = torch.empty(4, *result.shape, device="cuda"), torch.empty(4, 50, *out.shape, device="cuda").half()
    torch.cuda.synchronize()
    for step in range(50):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                parts[k].fill_(torch.nan)
                launch(x, w, parts[k], outs[k, step])
    torch.cuda.synchronize()
    assert bool((outs == out).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(10):
            launch(x, w, parts[0], outs[0, step])
    for _ in range(20):
        outs.zero_()
        graph.replay()
        assert bool((outs[0, :10] == out).all())


def test_streams_graphs_and_threads() -> None:
    kernel = total(1 << 16, 64)
    launch = build(kernel)
    x = torch.randn(1 << 16, device="cuda")
    parts, out = torch.empty(64, device="cuda"), torch.empty((), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(x, parts, out)
    stream.synchronize()
    torch.testing.assert_close(out, x.sum(), rtol=1e-4, atol=1e-3)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, parts, out)
    x.add_(1.0)
    graph.replay()
    torch.testing.assert_close(out, x.sum(), rtol=1e-4, atol=1e-3)

    failures: list[BaseException] = []

    def work() -> None:
        try:
            check(LARGE["softmax 781"])
            check(LARGE["matmul float16 01"])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_thread_that_has_done_nothing_on_the_device() -> None:
    launch = build(add(1000))
    x, y, out = tensors(add(1000), "cuda")
    launch(x, y, out)
    torch.cuda.synchronize()
    want = x + y
    out.zero_()
    torch.cuda.synchronize()
    thread = threading.Thread(target=launch, args=(x, y, out))
    thread.start()
    thread.join()
    torch.testing.assert_close(out, want)


def test_a_graph_in_threads_that_have_done_nothing_on_the_device() -> None:
    """Forward and backward of code compiled in that thread, and of code compiled in another."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).sum(-1)

    x = torch.randn(64, 100, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    fused = fusion.fuse(f, options={"strict": True})
    results: list[torch.Tensor | BaseException] = []

    def work() -> None:
        try:
            result = fused(x)
            results.append(torch.autograd.grad(result, x, torch.ones_like(result))[0])
        except BaseException as failure:
            results.append(failure)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    for got in results:
        assert isinstance(got, torch.Tensor), got
        torch.testing.assert_close(got, expected)


def test_descriptors_in_a_graph() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs tensor descriptors")
    kernel = matmul(2048, 2048, 512, BF16, turned=(False, True))
    launch = build(kernel)
    a, c = (torch.randn([int(s) for s in p.shape], device="cuda").to(BF16) for p in kernel.params[:2])
    out = torch.empty(1, 2048, 2048, device="cuda", dtype=BF16)
    launch(a, c, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(a, c, out)
    a.neg_()
    graph.replay()
    torch.testing.assert_close(out.float(), (a.float() @ c.float().transpose(1, 2)).relu(), rtol=2e-2, atol=2e-1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_of_another_device() -> None:
    launch = build(add(1000))
    for device in ("cuda:1", "cuda:0"):
        x, y, out = tensors(add(1000), device)
        launch(x, y, out)
        torch.testing.assert_close(out, x + y)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_binary_that_cannot_be_had_at_a_call(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With symbolic sizes it is built at the first call; with fixed ones it is loaded, and may not fit the device."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise BuildError("out of resources")

    def bent(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1) + (3 if dynamic else 4)

    fused = fusion.fuse(bent, dynamic=dynamic)
    x = torch.randn(65, 771, device="cuda")
    monkeypatch.setattr(launching, "compile_for" if dynamic else "_run", refuse)
    with pytest.warns(fusion.FusionWarning, match="out of resources"):
        got = fused(x)
    torch.testing.assert_close(got, bent(x))
    torch.testing.assert_close(fused(x), bent(x))
    labels = [(graph.label, bool(graph.failure)) for graph in fusion.report(fused).graphs]
    assert labels[-2:] == [("inference", False), ("inference, called", True)]


@pytest.mark.parametrize("graphed", [False, True])
def test_launches_that_are_prepared_early_read_finished_results(graphed: bool) -> None:
    """Each launch reads all that the one before wrote, in another order: a program that started early would differ."""

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.softmax(x.flip(0).roll(17, 0), -1).cumsum(0).sin()
        return x

    options = fusion.Options.read("reduce-overhead" if graphed else None, {"strict": True, "graph_cache": False})
    compiled = torch.compile(step, backend=fusion.Backend(options))
    x = torch.randn(4096, 257, device="cuda")
    with torch.no_grad():
        first = compiled(x).clone()
        for _ in range(20):
            assert torch.equal(compiled(x), first)
    exact, eager = step(x.double()), step(x)
    assert (first - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()
