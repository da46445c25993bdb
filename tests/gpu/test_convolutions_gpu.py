"""Convolutions on a device: with channels last where that pays, with results as near and laid out as eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fusion
from fusion.joint import channels_last as formats
from fusion.joint.channels_last import prefer_channels_last
from tests.fusion.joint.test_channels_last import LAYOUTS, Residual, Views, outcome

pytestmark = pytest.mark.gpu


class Separable(nn.Module):
    """A depthwise convolution, and a pointwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 32, 4, stride=4)
        self.each, self.norm, self.mix = nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        return x + self.mix(self.norm(self.each(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize(
    ("kind", "shape"), [(Residual, (8, 3, 65, 62)), (Views, (4, 4, 21, 30)), (Separable, (8, 3, 64, 60))]
)
def test_errors_and_strides_agree_with_eager(
    kind: type[nn.Module], shape: tuple[int, ...], half: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if half:
        monkeypatch.setattr(formats, "saved_bytes", lambda call, layouts: 1e12)
    module, x = kind().cuda(), torch.randn(shape, device="cuda", requires_grad=True)
    fused = fusion.fuse(copy.deepcopy(module), options={"strict": True})
    with torch.autocast("cuda", half or torch.float16, enabled=half is not None):
        ours, theirs = (outcome(run, run, x) for run in (fused, copy.deepcopy(module)))
    exact = copy.deepcopy(module).double()
    wanted = outcome(exact, exact, x.detach().double().requires_grad_())
    for mine, eager, true in zip(ours, theirs, wanted, strict=True):
        assert mine.stride() == eager.stride() and mine.dtype == eager.dtype
        allowed = 2 * (eager - true).norm() + (2e-2 if half else 1e-3) * true.norm() + 1e-5
        assert (mine - true).norm() <= allowed


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("channels", "window", "settings"),
    [(3, 7, {"stride": 2, "padding": 3}), (1, 5, {"padding": 2}), (4, 3, {"stride": 3, "padding": 1}), (3, 3, {})],
)
def test_windows_of_few_channels_call_no_library(
    channels: int, window: int, settings: dict[str, int], order: torch.memory_format
) -> None:
    module = nn.Sequential(nn.Conv2d(channels, 33, window, **settings), nn.BatchNorm2d(33), nn.ReLU()).eval()
    module = module.to("cuda", torch.bfloat16, memory_format=order)
    x = torch.randn(5, channels, 63, 58, device="cuda").bfloat16().contiguous(memory_format=order)
    with torch.no_grad():
        theirs, exact = module(x), copy.deepcopy(module).double()(x.double())
        ours = fusion.fuse(module, options={"strict": True})(x)
        (report,) = fusion.explain(module)(x).graphs
    assert ours.stride() == theirs.stride() and report.kernels and not report.externs
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


def test_16_bit_convolutions_with_windows_gain() -> None:
    with FakeTensorMode():
        given = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((8, 64, 28, 28), (64, 64, 3, 3))]
        graph = make_fx(lambda x, weight: F.conv2d(x, weight).relu())(*given)
    assert prefer_channels_last(graph, LAYOUTS)
