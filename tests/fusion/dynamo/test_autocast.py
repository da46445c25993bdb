"""Under autocast of a GPU, images are resized in float32, as eager does it, without a GPU at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.nn import functional as F

import fusion
from fusion.dynamo import autocast
from fusion.dynamo.autocast import widen_resized_images

RESIZED: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "nearest": (3, lambda x: F.interpolate(x, scale_factor=2)),
    "nearest-exact": (2, lambda x: F.interpolate(x, 7, mode="nearest-exact")),
    "linear": (1, lambda x: F.interpolate(x, None, 2.0, "linear")),
    "bilinear": (2, lambda x: F.interpolate(input=x, scale_factor=0.5, mode="bilinear")),
    "bicubic": (2, lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    "trilinear": (3, lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")),
    "area": (2, lambda x: F.interpolate(x, scale_factor=0.5, mode="area")),
    "by its own name": (2, lambda x: torch._C._nn.upsample_bilinear2d(x, (8, 8), False, None)),
}


@contextmanager
def autocast_of_gpus(enabled: bool) -> Iterator[None]:
    """Switch the autocast of GPUs on or off, which `torch.autocast` refuses without a GPU."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", RESIZED)
def test_dtypes_agree_with_eager(kind: str, enabled: bool, dtype: torch.dtype) -> None:
    dims, resize = RESIZED[kind]
    graph = symbolic_trace(resize)
    widen_resized_images(graph)
    with FakeTensorMode(), autocast_of_gpus(enabled):
        image = torch.empty((2, 3, *[6] * dims), device="cuda", dtype=dtype)
        wanted = resize(image)
        with enable_python_dispatcher():  # as AOTAutograd traces
            assert graph(image).dtype is wanted.dtype


@pytest.mark.parametrize("exact", [False, True])
def test_captured_images_are_widened(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "widened", lambda image: image.double())

    def resize(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(F.interpolate, x, None, 2.0, use_reentrant=False)

    for function in (resize, RESIZED["bilinear"][1]):
        options = {"strict": True, "numerics": "strict"} if exact else {"strict": True}
        assert fusion.fuse(function, options=options)(torch.randn(2, 3, 4, 4)).dtype is torch.float64
