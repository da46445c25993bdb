"""`fusion calibrate`: what is measured, where it is kept, and who reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusion
from fusion.calibrate import calibrate, lines
from fusion.codegen import calibration
from fusion.codegen.c import device
from fusion.codegen.c.build import cpu_identity
from fusion.codegen.c.device import COSTS, EPYC, EPYC_AVX2, Cpu
from fusion.codegen.c.target import CTarget
from fusion.codegen.cache import put
from fusion.codegen.calibration import DeviceSpeeds
from fusion.codegen.triton.devices import H200, calibrated
from fusion.codegen.triton.devices.derived import speeds
from tests.codegen.kernels.products import matmul

FIGURES = DeviceSpeeds(
    name="a CPU",
    launch_us=3.0,
    memory=((1e6, 50_000.0), (1e8, 10_000.0)),
    flops=30_000.0,
    gemms={2: 400_000.0, 4: 100_000.0, 8: 50_000.0},
    products={4: 0.9},
    costs={"exp": 19.0},
)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_cpu_has_the_speeds_that_were_kept(empty_cache: Path) -> None:
    threads = torch.get_num_threads()
    assert CTarget().capabilities.rates.launch_us == EPYC.launch_us
    calibration.keep(FIGURES, cpu_identity(), threads)
    rates = CTarget().capabilities.rates
    assert rates.launch_us == 3.0 and rates.flops == threads * 30_000.0
    assert rates.memory_us(1e3) == pytest.approx(1e3 / (threads * 50_000.0))
    assert rates.memory_us(1e10) == pytest.approx(1e10 / (threads * 10_000.0))
    assert rates.product_us_of(1e6, 4) == pytest.approx(1e6 / (threads * 100_000.0))


def test_generated_products_are_priced_where_they_were_measured(empty_cache: Path) -> None:
    many, doubles = (matmul(256, 256, 256, dtype) for dtype in (torch.float32, torch.float64))
    assert not CTarget().capabilities.lone_products.keys() & {4, 8} and CTarget().efficiency(many) < 0.1
    calibration.keep(FIGURES, cpu_identity(), torch.get_num_threads())
    assert CTarget().capabilities.lone_products.keys() >= {4}
    assert CTarget().efficiency(many) == 0.9
    assert CTarget().efficiency(doubles) < 0.1
    costs = CTarget().capabilities.rates.costs
    assert costs["exp"] == 19.0 and costs["log"] == COSTS["log"]


TEXT = json.dumps(asdict(FIGURES))
DAMAGED = {
    "torn": "{",
    "another value": "[]",
    "incomplete": '{"name": "a CPU"}',
    "no text": "\udcff",
    "without a speed": json.dumps(asdict(replace(FIGURES, flops=0.0))),
    "without a number": TEXT.replace("30000.0", "NaN"),
    "beyond all numbers": TEXT.replace("30000.0", "1e400"),
    "a size beyond all numbers": TEXT.replace('"2"', '"1e400"'),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_that_is_torn_or_wrong_counts_as_absent(text: str, sealed: bool, empty_cache: Path) -> None:
    path = calibration.keep(FIGURES, cpu_identity(), torch.get_num_threads())
    assert CTarget().capabilities.rates.launch_us == FIGURES.launch_us
    content = text.encode("utf-8", "surrogatepass")
    path.write_bytes(content)
    if sealed:
        put("devices", path.name, content)
    calibration._kept.cache_clear()
    assert CTarget().capabilities.rates.launch_us == EPYC.launch_us


def test_the_figures_of_another_device_count_as_absent(empty_cache: Path) -> None:
    ours = calibration.keep(FIGURES, cpu_identity(), torch.get_num_threads())
    theirs = calibration.keep(replace(FIGURES, launch_us=7.0), "another CPU", torch.get_num_threads())
    theirs.rename(ours)
    calibration._kept.cache_clear()
    assert CTarget().capabilities.rates.launch_us == EPYC.launch_us


def test_other_numbers_of_threads_are_other_devices(empty_cache: Path) -> None:
    calibration.keep(FIGURES, cpu_identity(), torch.get_num_threads() + 1)
    assert CTarget().capabilities.rates.launch_us == EPYC.launch_us


def test_generated_kernels_of_a_gpu_keep_their_shares() -> None:
    device = calibrated(H200, replace(FIGURES, memory=((1e9, 3e6),), gemms={2: 8e8, 4: 4.8e7}))
    assert device.measured is not None
    assert device.measured.bandwidth == 3e6 and device.measured.matrix_share[4] == 0.06
    assert device.measured.matrix_share[1] == speeds(H200).matrix_share[1]
    assert device.measured.products == speeds(H200).products


@pytest.mark.slow
def test_this_cpu_is_measured(empty_cache: Path) -> None:
    figures, path = calibrate("cpu")
    assert path.is_relative_to(empty_cache) and len([*lines(figures, path)]) > 3
    speeds_of_memory = [speed for _, speed in figures.memory]
    assert speeds_of_memory == sorted(speeds_of_memory, reverse=True) and speeds_of_memory[-1] > 0
    assert figures.flops > 0 and figures.gemms.keys() == {2, 4, 8} == figures.products.keys()
    assert figures.costs.keys() | {"checked", "random"} == COSTS.keys()
    assert all(share > 0 for share in figures.products.values())
    assert CTarget().capabilities.rates.launch_us == figures.launch_us


@pytest.mark.parametrize("halves", [False, True])
def test_products_of_16_bits_are_generated_where_the_library_has_no_instructions_for_them(
    halves: bool, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "assumed", lambda: EPYC if halves else EPYC_AVX2)
    for dtype in (torch.bfloat16, torch.float32):
        x, w = (torch.randn(96, 128, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(2))
        fused = fusion.fuse(lambda x, w: x @ w.t(), options={"target": "c", "graph_cache": False, "strict": True})
        exact = x.double() @ w.double().t()
        error, theirs = ((y.double() - exact).norm() / exact.norm() for y in (fused(x, w), x @ w.t()))
        assert error <= max(2 * theirs, 1e-6)
        assert bool(fusion.report(fused).kernels) == (dtype is torch.bfloat16 and not halves)


@pytest.mark.parametrize("shape", [(1, 4, 256, 32), (1, 12, 97, 64)], ids=["chained", "few scores"])
def test_attention_of_16_bits_is_generated_where_the_library_has_no_instructions_for_them(
    shape: tuple[int, ...], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "assumed", lambda: EPYC_AVX2)
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    fused = fusion.fuse(
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True),
        options={"target": "c", "graph_cache": False, "strict": True},
    )
    exact = [x.detach().double().requires_grad_() for x in args]

    def outcome(attend: Callable[..., Tensor], values: list[Tensor]) -> list[Tensor]:
        result = attend(*values)
        return [result.detach(), *torch.autograd.grad(result.square().sum(), values)]

    def eager(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    for ours, theirs, right in zip(outcome(fused, args), outcome(eager, args), outcome(eager, exact), strict=True):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (ours, theirs))
        assert error <= 2 * allowed
    assert not any("attention" in call.name for call in fusion.report(fused).externs)


@pytest.mark.parametrize("cpu", [EPYC, EPYC_AVX2], ids=["with instructions", "without"])
def test_small_products_are_sums_whatever_the_speed_of_16_bits(cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "assumed", lambda: cpu)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x, w = (torch.randn(30, 30, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(2))
        fused = fusion.fuse(
            lambda x, w: torch.relu(x @ w), options={"target": "c", "graph_cache": False, "strict": True}
        )
        exact = torch.relu(x.double() @ w.double())
        error, theirs = ((y.double() - exact).norm() / exact.norm() for y in (fused(x, w), torch.relu(x @ w)))
        assert error <= max(2 * theirs, 1e-6 if dtype is torch.float32 else 1e-14)
        assert not fusion.report(fused).externs
