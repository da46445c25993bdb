"""The speed of kernels on a device.

`pytest tests/gpu/test_speed_gpu.py -s` prints the cost of a launch, and the kernels in comparison with torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from tests.codegen.kernels.making import BF16, F32, I8, LOOP, WHOLE, tensors
from tests.codegen.kernels.pointwise import add, bias_gelu, permuted, transposed_add
from tests.codegen.kernels.products import matmul
from tests.codegen.kernels.rows import fold, layernorm, softmax
from tests.codegen.kernels.small import SMALL
from tests.gpu.launched import build

pytestmark = pytest.mark.gpu


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
    """Prints the share of the bandwidth of a copy of the same bytes."""
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
    """Prints the speed and the library's, for the default and for every other configuration."""
    m, n, k = sizes
    kernel = matmul(m, n, k, BF16, turned=(False, True))
    a, c = torch.randn(1, m, k, device="cuda").to(BF16), torch.randn(1, n, k, device="cuda").to(BF16)
    out = torch.empty(1, m, n, device="cuda", dtype=BF16)
    library = seconds(lambda: torch.matmul(a, c.transpose(1, 2), out=out))
    print(f"\n{sizes}: library {2 * m * n * k / library / 1e12:.0f} TFLOP/s")
    for config in TritonTarget().configs(kernel):
        launch = build(kernel, config)
        took = seconds(lambda launch=launch: launch(a, c, out))
        form = "descriptors" if isinstance(config, PersistentConfig) else "pointers"
        print(f"  {form} {dict(config.blocks)} w{config.num_warps} s{config.num_stages}: {library / took:.2f} of it")
