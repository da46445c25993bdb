"""Tuning on a device: every configuration that is offered gives the right numbers, and the fastest is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import fusion
from fusion.codegen.build import KernelBuilder
from fusion.codegen.targets import TARGETS
from fusion.codegen.tuning import Tuner
from fusion.lowering.ir.kernel import Kernel, Role
from tests.codegen.kernels.attention import online_attention
from tests.codegen.kernels.making import BF16, assert_same, expected, tensors
from tests.codegen.kernels.pointwise import gather
from tests.codegen.kernels.products import linear, matmul, residual, rms_linear
from tests.codegen.kernels.rows import layernorm, norm_backward, softmax

pytestmark = pytest.mark.gpu

KERNELS: dict[str, Kernel] = {
    "pointers": matmul(300, 500, 700, BF16),
    "descriptors": matmul(4096, 4096, 1024, BF16, turned=(False, True)),
    "batch": matmul(1024, 776, 264, BF16, batch=9),
    "residual": residual(4000, 2056, 520, BF16),
    "in place": residual(4000, 2056, 520, BF16, over=True),
    "prologue": linear(1000, 700, 512, BF16),
    "rows": softmax(2000, 5000, Role.WHOLE),
    "looped over": softmax(60, 70_000, Role.LOOP),
    "layernorm": layernorm(3000, 768, BF16),
    "columns": norm_backward(3000, 768),
    "gather": gather(3001, 770),
    "attention": online_attention(4, 512, 512, 128, dtype=BF16, causal=True, group=2, scale=0.09),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_configuration_is_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    ((_, tuning),) = Tuner(KernelBuilder(TARGETS["triton"]()), torch.device("cuda", 0)).build([KERNELS[name]])
    print(f"\n{tuning}")
    assert not tuning.reason
    refused = [trial for trial in tuning.trials if trial.refused and "cannot be built" not in trial.refused]
    assert not refused, refused
    times = [trial.microseconds for trial in tuning.trials]
    assert times[tuning.chosen] == min(times) and len(times) > 1


def test_a_miscompiled_configuration_does_not_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 loses numbers where a tile is multiplied and summed at once, in blocks of 128 and more."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    kernel = rms_linear(300, 500, 700)
    ((built, tuning),) = Tuner(KernelBuilder(TARGETS["triton"]()), torch.device("cuda", 0)).build([kernel])
    print(f"\n{tuning}")
    assert not tuning.reason
    given = tensors(kernel)
    want = expected(kernel, given)
    got = [tensor.cuda() for tensor in given]
    built.launch(*got)
    assert_same(kernel, [tensor.cpu() for tensor in got], want, 4.0)


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_long_sum(dtype: torch.dtype, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result is right for the library and for kernels, in any number of parts."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w.t())

    x, w = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((512, 8192), (384, 8192)))
    fused = fusion.fuse(product, mode=mode, dynamic=False)
    exact = product(x.double(), w.double())
    error, eager = (((y.double() - exact).norm() / exact.norm()).item() for y in (fused(x, w), product(x, w)))
    assert error <= 2 * eager
    tunings = fusion.report(fused).graphs[-1].tunings
    (choice,) = [tuning for tuning in tunings if tuning.trials and tuning.trials[0].name == "one kernel"]
    print(f"\n{choice}")
    assert [trial.name for trial in choice.trials][::2] == ["one kernel", "the library"]
    assert not any(trial.refused for trial in choice.trials)
    if mode == "max-autotune":
        times = [trial.measured for trial in choice.trials]
        assert None not in times and times[choice.chosen] == min(time for time in times if time is not None)
