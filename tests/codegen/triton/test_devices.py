"""Devices: derived properties, the device of an architecture or a machine, and that kernels fit all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.capabilities import capabilities
from fusion.codegen.triton.devices import H200, KNOWN, WARP_SPECIALISED, Device, Feature, device_of, like, speeds
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.load import load
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.attention import online_attention
from tests.codegen.kernels.large import LARGE
from tests.codegen.kernels.making import BF16, F16, LOOP
from tests.codegen.kernels.products import matmul
from tests.codegen.kernels.rows import softmax
from tests.codegen.triton.texts import compiles
from tests.golden.models import MODELS
from tests.golden.programs import PROGRAMS
from tests.golden.recording import kernels_for

QUICK: dict[str, Kernel] = {
    "product": matmul(4096, 4096, 4096, BF16, out=BF16),
    "attention": online_attention(32, 4096, 4096, 128, dtype=BF16, scale=0.09),
    "rows": softmax(4096, 65_536, LOOP, BF16),
}
"""Kernels with the highest demands on a device: shared memory, registers, threads."""

RICH = ("matmul f", "matmul bf", "gated", "packed p", "online attention", "attention_d", "softmax loop", "column s")
"""Prefixes of the names of the kernels of `LARGE` with the highest demands."""


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "shared", "threads", "warp"),
    [
        ("sm_70", 96, 2048, 32),
        ("sm_72", 96, 2048, 32),
        ("sm_75", 64, 1024, 32),
        ("sm_80", 163, 2048, 32),
        ("sm_86", 99, 1536, 32),
        ("sm_87", 163, 1536, 32),
        ("sm_88", 99, 1536, 32),
        ("sm_89", 99, 1536, 32),
        ("sm_90", 227, 2048, 32),
        ("sm_90a", 227, 2048, 32),
        ("sm_100", 227, 2048, 32),
        ("sm_103", 227, 2048, 32),
        ("sm_110", 227, 1536, 32),
        ("sm_120", 99, 1536, 32),
        ("sm_121", 99, 1536, 32),
        ("gfx942", 64, 2048, 64),
        ("gfx950", 160, 2048, 64),
        ("gfx1100", 64, 2048, 32),
    ],
)
def test_architectures_have_the_limits_that_are_published(arch: str, shared: int, threads: int, warp: int) -> None:
    device = device_of(arch)
    assert device.arch == arch
    assert (device.shared_per_program >> 10, device.threads_per_multiprocessor, device.warp) == (shared, threads, warp)
    assert device.shared_per_program <= device.shared_per_multiprocessor
    assert device.most_warps * device.warp == device.threads_per_program == 1024


@pytest.mark.parametrize("arch", ["pdp11", "sm_10", "sm_", "90"])
def test_unknown_architectures_are_refused(arch: str) -> None:
    with pytest.raises(BuildError, match="unknown architecture"):
        TritonTarget(arch).emit(QUICK["rows"])


def test_an_architecture_without_a_device_takes_after_the_nearest_one() -> None:
    assert device_of("sm_103").multiprocessors == KNOWN["sm_100"].multiprocessors
    assert device_of("sm_87").features == KNOWN["sm_86"].features and not device_of("sm_75").has(Feature.TF32)
    assert speeds(device_of("sm_90a")) is H200.measured and device_of("sm_103").measured is None


def test_an_architecture_without_a_device_has_its_own_rate_of_float64() -> None:
    for arch, ratio in (("sm_70", 2), ("sm_75", 32), ("sm_87", 64), ("sm_103", 64), ("sm_110", 64)):
        assert device_of(arch).matrix[8] == device_of(arch).flops / ratio
    assert speeds(device_of("sm_103")).matrix_share[8] < speeds(KNOWN["sm_100"]).matrix_share[8] / 30


def test_features_follow_from_the_architecture() -> None:
    having = {feature: {arch for arch, device in KNOWN.items() if device.has(feature)} for feature in Feature}
    assert having[Feature.WARP_GROUPS] == {"sm_90"}
    assert having[Feature.TENSOR_COPIES] == {"sm_90", "sm_100", "sm_120"}
    assert having[Feature.ASYNC_UNITS] == {"sm_90", "sm_100"}
    assert having[Feature.PTX] == set(KNOWN) - {"gfx942"}


@pytest.mark.parametrize("arch", KNOWN)
def test_speeds_that_are_not_measured_follow_from_specifications(arch: str) -> None:
    device = KNOWN[arch]
    result = speeds(device)
    if device.measured is not None:
        assert result is device.measured
        return
    assert 0.85 * device.bandwidth < result.bandwidth < device.bandwidth
    assert 0.7 * device.matrix[2] < result.matrix_flops < device.matrix[2]
    assert result.matrix_share[2] == 1.0 and result.tf32_share == device.matrix[4] / device.matrix[2]
    assert 0 < result.matrix_share[8] <= result.matrix_share[1]
    assert not any(form == WARP_SPECIALISED for form, _ in result.attention)
    assert result.products.pointers == (0.6 if device.has(Feature.ASYNC_UNITS) else 0.95)
    assert result.products.by_warps == (0.6 if device.has(Feature.ASYNC_UNITS) else 1.0)
    assert capabilities(device, DEFAULT).parallelism == 2 * device.multiprocessors


def test_float32_gains_nothing_by_products_of_tf32_that_are_no_faster() -> None:
    assert speeds(KNOWN["sm_80"]).products.float32 > 1.0 > speeds(KNOWN["sm_89"]).products.float32


def test_derived_speeds_of_the_measured_device_are_near_the_measured_ones() -> None:
    measured, derived = H200.measured, speeds(replace(H200, measured=None))
    assert measured is not None
    for name in ("bandwidth", "cache_bandwidth", "flops", "matrix_flops", "tf32_share"):
        assert getattr(derived, name) == pytest.approx(getattr(measured, name), rel=0.01)
    for size, share in measured.matrix_share.items():
        assert derived.matrix_share[size] == pytest.approx(share, rel=0.01)
    assert derived.products.float32 == pytest.approx(measured.products.float32, rel=0.1)


def test_a_device_at_hand_is_the_known_one_or_has_its_own_properties() -> None:
    own = {"name": "NVIDIA H200", "multiprocessors": 132, "shared": 232_448, "cache": 60 << 20, "bandwidth": 4.815e6}
    assert like(H200, **own) is H200
    slower = like(H200, **{**own, "name": "NVIDIA H100", "bandwidth": 3.35e6})
    assert slower.multiprocessors == 132 and slower.measured is not None and H200.measured is not None
    assert slower.measured.bandwidth == pytest.approx(H200.measured.bandwidth * 3.35 / 4.8)
    assert slower.measured.matrix_flops == H200.measured.matrix_flops
    smaller = like(KNOWN["sm_86"], name="RTX A2000", multiprocessors=26, shared=101_376, cache=0, bandwidth=0.0)
    assert smaller.flops == pytest.approx(KNOWN["sm_86"].flops * 26 / 82) and smaller.bandwidth == 9.36e5


def test_devices_and_their_records_are_values() -> None:
    same = replace(H200)
    assert same == H200 and hash(same) == hash(H200)
    assert capabilities(same, DEFAULT) is capabilities(H200, DEFAULT)
    assert capabilities(H200, Numerics(tf32=True)).rates.matrix_share[4] == 0.5


# Kernels --------------------------------------------------------------------------------------------------------------


def fits(kernel: Kernel, source: str, device: Device) -> None:
    """Compile a kernel for a device without it, and compare its demands with the device's limits."""
    metadata = compile_for(load(kernel, source), device, (False,) * len(kernel.sizes)).metadata
    assert metadata.shared <= device.shared_per_program, kernel.name
    assert metadata.num_warps * device.warp <= device.threads_per_program, kernel.name


@compiles
@pytest.mark.parametrize("arch", KNOWN)
def test_large_kernels_fit(arch: str) -> None:
    for kernel in QUICK.values():
        fits(kernel, TritonTarget(arch).emit(kernel), KNOWN[arch])


@pytest.mark.parametrize("arch", KNOWN)
def test_timed_configurations_have_a_pipeline_where_it_fits(arch: str) -> None:
    product = matmul(4096, 4096, 4096, F16)
    for config in TritonTarget(arch).configs(product):
        assert config.num_warps <= KNOWN[arch].most_warps and config.num_stages >= 2


@compiles
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", KNOWN)
def test_kernels_written_by_hand_fit(arch: str) -> None:
    target = TritonTarget(arch)
    for name, kernel in LARGE.items():
        if name.startswith(RICH):
            fits(kernel, target.emit(kernel), KNOWN[arch])


@compiles
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", KNOWN)
def test_kernels_of_programs_fit(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in PROGRAMS.values():
        with monkeypatch.context() as patched:
            kernels = kernels_for(program, arch, patched)
        for kernel, source in kernels.items():
            fits(kernel, source, KNOWN[arch])


@compiles
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_models_fit(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, source in kernels_for(MODELS[name], arch, monkeypatch).items():
        fits(kernel, source, KNOWN[arch])
