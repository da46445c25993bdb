"""Triton kernels on a device: every kind of kernel with small and with large ragged sizes, launches, streams, speed.

`pytest tests/gpu/test_triton_gpu.py -s` prints what a launch costs and how fast the kernels are beside torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import sympy
import torch

pytest.importorskip("triton")

from codegen.triton import Config, TritonTarget
from lowering.kernel import Kernel, Role
from lowering.scalar_ops import SCALAR_OPS
from tests.codegen.kernels.attention import attention, attention_dkv, attention_dq, linear_logsumexp, online_attention
from tests.codegen.kernels.making import BF16, F16, F32, F64, I8, assert_same, expected, packed, special, tensors
from tests.codegen.kernels.pointwise import (
    add,
    bias_gelu,
    causal,
    convert,
    drawn,
    gather,
    padded,
    permuted,
    scalar,
    transposed_add,
)
from tests.codegen.kernels.products import (
    gated,
    gathered_rows,
    linear,
    matmul,
    matmul_softmax,
    matmul_top,
    residual,
    rms_linear,
)
from tests.codegen.kernels.rows import (
    column_softmax,
    column_totals,
    fold,
    grouped_mean,
    layernorm,
    norm_backward,
    online_logsumexp,
    softmax,
    total,
)
from tests.codegen.kernels.small import SMALL

pytestmark = pytest.mark.gpu

GRID, LOOP, WHOLE = Role.GRID, Role.LOOP, Role.WHOLE

LARGE: dict[str, Kernel] = {
    "add": add(1_000_003),
    "add f16": add(1 << 20, F16),
    "bias_gelu": bias_gelu(1000, 777, BF16),
    "transposed_add": transposed_add(1023, 2049),
    "permuted": permuted(12, 333, 64),
    "padded": padded(100_000, 17, 300),
    "gather": gather(3001, 770),
    "causal": causal(1500),
    "uniform": drawn(1_000_000, "uniform"),
    "normal": drawn(1_000_000, "normal"),
    **{f"softmax {n}": softmax(257, n, WHOLE) for n in (1, 2, 17, 128, 129, 781, 2048, 4096, 8191, 16384, 32768)},
    **{f"softmax loop {n}": softmax(9, n, LOOP) for n in (1000, 65_536, 131_071)},
    "softmax bf16": softmax(1000, 1000, WHOLE, BF16),
    "layernorm": layernorm(1001, 768, F32),
    "layernorm bf16": layernorm(257, 5120, BF16),
    "layernorm f16 odd": layernorm(257, 1023, F16),
    "column sum": fold("sum", 5000, 1001, LOOP, along=0),
    "column softmax": column_softmax(77, 1001),
    "column softmax, tall": column_softmax(5001, 333),
    "column max whole": fold("max", 33, 10_001, WHOLE, along=0),
    "argmax": fold("argmax", 300, 5001, WHOLE),
    "argmax loop": fold("argmax", 30, 100_001, LOOP),
    "argmin f16": fold("argmin", 300, 5001, LOOP, F16),
    "sum i64": fold("sum", 300, 5001, LOOP, torch.int64),
    "prod": fold("prod", 300, 33, WHOLE),
    "any": fold("any", 300, 5001, LOOP, torch.bool),
    "norm_backward": norm_backward(999, 768),
    "grouped_mean": grouped_mean(8, 32, 1000),
    "total": total(1 << 20, 512),
    "column_totals": column_totals(8192, 100, 64),
    **{
        f"matmul {str(dtype)[6:]} {left:d}{right:d}": matmul(257, 391, 523, dtype, turned=(left, right))
        for dtype in (F16, BF16, F32, F64, I8)
        for left in (False, True)
        for right in (False, True)
    },
    "matmul one row": matmul(1, 1000, 777, BF16, turned=(False, True)),
    "matmul batch": matmul(129, 250, 100, F16, batch=7),
    "matmul aligned": matmul(512, 768, 1024, BF16, batch=3, turned=(False, True)),
    "matmul batch, persistent": matmul(520, 776, 264, BF16, batch=9),
    "residual": residual(2000, 1032, 520, BF16),
    "residual in place": residual(2000, 1032, 520, F16, over=True),
    "linear": linear(1000, 700, 512, BF16),
    "gathered_rows": gathered_rows(300, 200, 100),
    "rms_linear": rms_linear(300, 500, 700),
    "gated": gated(300, 500, 700),
    "gated aligned": gated(1000, 1024, 512),
    "gated turned": gated(1000, 1024, 512, turned=True),
    "packed pointwise": packed("packed", add(100_000), bias_gelu(70, 400, F16), add(3), transposed_add(400, 50)),
    "packed rows": packed("packed", softmax(50, 300, WHOLE), layernorm(30, 700, BF16), softmax(9, 1000, WHOLE)),
    "packed products": packed("packed", matmul(200, 35, 45), matmul(40, 170, 33, batch=2), gated(20, 35, 45)),
    "packed persistent": packed(
        "packed", matmul(1024, 2048, 512, BF16, out=BF16), gated(1000, 1024, 256, turned=True), matmul(640, 1024, 512)
    ),
    "matmul_softmax": matmul_softmax(300, 500, 200),
    "attention": attention(6, 300, 128, 64),
    "online attention": online_attention(6, 300, 700, 64, scale=0.125),
    "online attention wide": online_attention(2, 300, 700, 256, dtype=BF16, causal=True, scale=0.06),
    "online attention causal": online_attention(4, 512, 512, 128, dtype=BF16, causal=True, group=2, scale=0.09),
    "online attention window": online_attention(2, 700, 700, 40, causal=True, window=100, prefix=30, scale=0.16),
    "online attention f32": online_attention(2, 300, 300, 64, dtype=F32, causal=True, scale=0.125),
    "online attention odd": online_attention(2, 300, 301, 33, scale=0.2),
    "online attention one query": online_attention(6, 1, 700, 64, scale=0.125),
    "attention_dkv": attention_dkv(4, 512, 700, 24),
    "attention_dkv causal": attention_dkv(4, 512, 512, 24, dtype=BF16, causal=True),
    "attention_dq": attention_dq(4, 512, 700, 24),
    "attention_dq causal": attention_dq(4, 512, 512, 24, dtype=BF16, causal=True),
    "linear_logsumexp": linear_logsumexp(300, 5000, 512),
    "online_logsumexp": online_logsumexp(300, 50_000),
}


CHAINS = (
    "online attention causal",
    "online attention window",
    "attention_dkv causal",
    "attention_dq",
    "linear_logsumexp",
)


def build(kernel: Kernel, config: Config | None = None) -> Callable[..., None]:
    target = TritonTarget()
    return target.build(kernel, target.emit(kernel, config))


def check(kernel: Kernel, config: Config | None = None, *, factor: float = 4.0) -> None:
    """Launch, and compare with the reference evaluator on the CPU."""
    given = tensors(kernel)
    want = expected(kernel, given)
    got = [tensor.cuda() for tensor in given]
    build(kernel, config)(*got)
    assert_same(kernel, [tensor.cpu() for tensor in got], want, factor)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_small(name: str) -> None:
    check(SMALL[name])


@pytest.mark.parametrize("name", LARGE)
def test_large(name: str) -> None:
    check(LARGE[name])


@pytest.mark.parametrize(
    "name", ["softmax 781", "layernorm bf16", "bias_gelu", "column sum", "gated", "matmul batch", *CHAINS]
)
def test_every_configuration_gives_the_same(name: str) -> None:
    for config in TritonTarget().configs(LARGE[name]):
        check(LARGE[name], config)


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16, torch.int64, torch.int32, I8, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", SCALAR_OPS)
def test_scalar_op(name: str, dtype: torch.dtype) -> None:
    """Against eager on the device, with the values that are easy to get wrong."""
    given = special(name, dtype, 4096)
    if given is None:
        pytest.skip("eager has no such operation")
    kernel = scalar(name, dtype, 4096)
    given = [tensor.cuda() for tensor in given]
    wide = [x.float() if x.dtype in (F16, BF16) else x for x in given]
    want = SCALAR_OPS[name].meaning(*wide).to(kernel.params[-1].dtype)
    out = torch.empty_like(want)
    build(kernel)(*given, out)
    assert_same(kernel, [*given, out], [*given, want], factor=4.0)


@pytest.mark.parametrize("source", [F16, BF16, F32, F64, I8, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("target", [F16, BF16, F32, F64, I8, torch.int64, torch.uint8, torch.bool], ids=str)
def test_cast(source: torch.dtype, target: torch.dtype) -> None:
    (x,) = special("abs", source, 4096) or [torch.rand(4096) > 0.5]
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
        x = torch.where(x.isfinite() & (x.abs() < 100), x, 1)
    x = x.cuda()
    out = torch.empty(4096, dtype=target, device="cuda")
    build(convert(source, target, 4096))(x, out)
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("role", [WHOLE, LOOP])
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_nan_and_ties(name: str, role: Role) -> None:
    rows = torch.randint(0, 3, (64, 3000)).float()
    rows[::2, 700], rows[::4, 2900] = float("nan"), float("nan")
    rows[1] = float("-inf")
    rows[3] = float("inf")
    kernel = fold(name, 64, 3000, role)
    out = torch.empty(64, dtype=kernel.params[1].dtype, device="cuda")
    build(kernel)(rows.cuda(), out)
    want = getattr(rows, name if name[:3] == "arg" else f"a{name}")(1)  # on the CPU: the lowest index wins there
    torch.testing.assert_close(out.cpu(), want, equal_nan=True)


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_descriptors(dtype: torch.dtype, turned: tuple[bool, bool]) -> None:
    """The persistent form, with blocks that reach past the end in all of m, n and k, in each of its configurations."""
    kernel = matmul(2056, 1048, 1064, dtype, turned=turned)
    a, c = (torch.randn([int(s) for s in p.shape], device="cuda").to(dtype) for p in kernel.params[:2])
    left, right = (x.transpose(1, 2) if turn else x for x, turn in zip((a, c), turned, strict=True))
    want = (left.double() @ right.double()).relu()
    target = TritonTarget()
    persistent = [config for config in target.configs(kernel) if config.persistent]
    if torch.cuda.get_device_capability() < (9, 0):
        assert not persistent
    for config in persistent:
        assert "make_tensor_descriptor" in target.emit(kernel, config)
        out = torch.full((1, 2056, 1048), float("nan"), device="cuda", dtype=dtype)
        build(kernel, config)(a, c, out)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("turned", [(False, False), (True, True)])
def test_float32_products_are_at_least_as_exact_as_the_library(turned: tuple[bool, bool]) -> None:
    kernel = matmul(500, 390, 1030, F32, turned=turned)
    a, c, out = tensors(kernel, "cuda")
    left, right = (x.transpose(1, 2) if turn else x for x, turn in zip((a, c), turned, strict=True))
    launch = build(kernel)
    launch(a, c, out)
    exact = (left.double() @ right.double()).relu()
    assert (out - exact).abs().max() <= 1.2 * ((left @ right).relu() - exact).abs().max()
    left[0, 3, 5], left[0, 7, 1], right[0, 2, 9], left[0, 8, 2] = float("inf"), float("nan"), float("-inf"), 0.0
    launch(a, c, out)
    torch.testing.assert_close(out, (left @ right).relu(), rtol=1e-3, atol=1e-3, equal_nan=True)


def test_offsets_beyond_32_bits() -> None:
    size = (1 << 31) + (1 << 20) + 5
    if torch.cuda.mem_get_info()[0] < 4 * size:
        pytest.skip("needs 8 GB of memory")
    x, y = (torch.ones(size, dtype=I8, device="cuda") for _ in range(2))
    out = torch.zeros(size, dtype=I8, device="cuda")
    y[-3:] = 5
    build(add(size, I8))(x, y, out)
    assert int(out[-1]) == 6 and int(out[-4]) == 2 and int(out[1 << 31]) == 2
    assert bool((out[: 1 << 20] == 2).all())


# Launches -------------------------------------------------------------------------------------------------------------


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
    """Views that start anywhere: launched in turn with aligned ones, through pointers and through descriptors."""
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


def test_the_last_program_sees_what_all_have_written() -> None:
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


# Speed ----------------------------------------------------------------------------------------------------------------


def test_a_launch_costs_little() -> None:
    for kernel in (add(7), SMALL["layernorm f32"]):
        launch = build(kernel)
        given = [tensor.cuda() for tensor in tensors(kernel)]
        for _ in range(100):
            launch(*given)
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                launch(*given)
            best = min(best, (time.perf_counter() - start) / 200)
        torch.cuda.synchronize()
        print(f"\nlaunch of {kernel.name} with {len(given)} tensors: {best * 1e6:.2f} us on the host")
        assert best < 20e-6


def seconds(run: Callable[[], object]) -> float:
    """The median time of `run` on the device, with a cold cache."""
    flush = torch.empty(1 << 28, dtype=I8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(20):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return sorted(times)[len(times) // 2]


BOUND_BY_MEMORY = {
    "add f32": add(1 << 26),
    "add bf16": add(1 << 27, BF16),
    "bias_gelu bf16": bias_gelu(16384, 3072, BF16),
    "transposed_add": transposed_add(8192, 8192),
    "permuted": permuted(16, 8192, 64 * 8),
    **{
        f"softmax f32 {n}": softmax((1 << 26) // n, n, WHOLE)
        for n in (64, 256, 781, 1024, 2048, 4096, 8192, 16384, 32768)
    },
    **{f"softmax bf16 {n}": softmax((1 << 27) // n, n, WHOLE, BF16) for n in (781, 4096, 16384)},
    "softmax f32 loop 65536": softmax(1024, 65536, LOOP),
    "layernorm f32 768": layernorm(65536, 768, F32),
    "layernorm bf16 4096": layernorm(16384, 4096, BF16),
    "column sum": fold("sum", 8192, 8192, LOOP, along=0),
    "row sum": fold("sum", 8192, 8192, LOOP),
    "argmax": fold("argmax", 8192, 8192, WHOLE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUND_BY_MEMORY)
def test_speed_of_kernels_bound_by_memory(name: str) -> None:
    """Prints the fraction of what a copy of the same bytes achieves."""
    kernel = BOUND_BY_MEMORY[name]
    given = [torch.ones([int(s) for s in p.shape], dtype=p.dtype, device="cuda") for p in kernel.params]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in given)
    source = torch.ones(moved // 2, dtype=I8, device="cuda")
    copy = torch.empty_like(source)
    limit = seconds(lambda: copy.copy_(source))
    best: dict[str, float] = {}
    for config in TritonTarget().configs(kernel):
        launch = build(kernel, config)
        best[f"{dict(config.blocks)} w{config.num_warps}"] = seconds(lambda launch=launch: launch(*given))
    default = next(iter(best.values()))
    winner = min(best, key=lambda key: best[key])
    print(
        f"\n{name}: {default * 1e6:.1f} us, {limit / default:.2f} of a copy "
        f"({moved / default / 1e12:.2f} TB/s); best {winner}: {limit / best[winner]:.2f}"
    )
    assert limit / default > 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (16384, 1024, 1024)], ids=str
)
def test_speed_of_contractions(sizes: tuple[int, int, int]) -> None:
    """Prints the speed beside the library's, for the default and for every other configuration."""
    m, n, k = sizes
    kernel = matmul(m, n, k, BF16, turned=(False, True))
    a, c = torch.randn(1, m, k, device="cuda").to(BF16), torch.randn(1, n, k, device="cuda").to(BF16)
    out = torch.empty(1, m, n, device="cuda", dtype=BF16)
    library = seconds(lambda: torch.matmul(a, c.transpose(1, 2), out=out))
    print(f"\n{sizes}: library {2 * m * n * k / library / 1e12:.0f} TFLOP/s")
    for config in TritonTarget().configs(kernel):
        launch = build(kernel, config)
        took = seconds(lambda launch=launch: launch(a, c, out))
        form = "descriptors" if config.persistent else "pointers"
        print(f"  {form} {dict(config.blocks)} w{config.num_warps} s{config.num_stages}: {library / took:.2f} of it")
