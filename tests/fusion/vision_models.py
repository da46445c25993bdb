"""Models of timm and torchvision, as small as their parts allow: name → (model, inputs); none where not installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, object]]


class First(nn.Module):
    """A network for images, called as models of transformers are: its result comes in a tuple."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.net(pixels),)


def _built(net: nn.Module, size: int = 32) -> Built:
    return First(net), {"pixels": torch.randn(2, 3, size, size)}


def _timm(name: str, size: int = 32, **settings: object) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        return _built(timm.create_model(name, num_classes=7, **settings), size)

    return build


def _densenet() -> Built:
    from torchvision.models import DenseNet

    return _built(DenseNet(growth_rate=4, block_config=(1, 2), num_init_features=8, num_classes=7))


def _mobilenet_v3() -> Built:
    from torchvision.models import mobilenet_v3_small

    return _built(mobilenet_v3_small(num_classes=7, width_mult=0.25))


def _shufflenet() -> Built:
    from torchvision.models import ShuffleNetV2

    return _built(ShuffleNetV2([1, 1, 1], [8, 16, 16, 32, 32], num_classes=7), 96)


def _swin_transformer() -> Built:
    from torchvision.models import SwinTransformer

    net = SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=7)
    return _built(net)


_TIMM: dict[str, Callable[[], Built]] = {
    "timm convnext": _timm("test_convnext"),
    "timm efficientnet": _timm("test_efficientnet"),
    "timm regnet": _timm("test_byobnet"),
    "timm resnet": _timm("test_resnet", 96),
    "timm vit": _timm("test_vit", 160),
}
_TORCHVISION: dict[str, Callable[[], Built]] = {
    "torchvision densenet": _densenet,
    "torchvision mobilenet_v3": _mobilenet_v3,
    "torchvision shufflenet": _shufflenet,
    "torchvision swin": _swin_transformer,
}
VISION_MODELS: dict[str, Callable[[], Built]] = {
    **(_TIMM if find_spec("timm") else {}),
    **(_TORCHVISION if find_spec("torchvision") else {}),
}
