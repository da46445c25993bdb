"""Defines more models, against overfitting to the others: of `timm` and `transformers`, and two written out.

Six layers of most, in their usual widths.  Random weights, and no random operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Batch, Model, images, own_loss, tokens

WORDS = 32000


def _of_timm(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False)
    return model


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["images"].to(next(model.parameters()).dtype))
    return F.cross_entropy(scores.float(), batch["labels"])


def _of_transformers(name: str, **settings: object) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    kinds = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")
    kind = next(name + kind for kind in kinds if hasattr(transformers, name + kind))
    model: nn.Module = getattr(transformers, kind)(config)
    model.loss_type = "ForMaskedLM" if kind.endswith("MaskedLM") else "ForCausalLM"
    return model


DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 6,
    "use_cache": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
ENCODER_DECODER = {"vocab_size": WORDS, "d_model": 768, "d_ff": 3072, "num_layers": 6, "num_heads": 12}
DISENTANGLED = {
    "vocab_size": WORDS,
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_buckets": 256,
    "pos_att_type": ["p2c", "c2p"],
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Ranking(nn.Module):
    """A recommendation model in the manner of DLRM: bags of embeddings, their products, and two perceptrons."""

    TABLES, WIDTH = 26, 64

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(100000, self.WIDTH, mode="sum") for _ in range(self.TABLES)])
        self.below = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, self.WIDTH), nn.ReLU())
        pairs = (self.TABLES + 1) * self.TABLES // 2
        self.above = nn.Sequential(nn.Linear(self.WIDTH + pairs, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, dense: Tensor, places: Tensor) -> Tensor:
        x = self.below(dense)
        vectors = torch.stack([x, *(table(places[:, k]) for k, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.tril_indices(self.TABLES + 1, self.TABLES + 1, -1, device=dense.device)
        scores: Tensor = self.above(torch.cat([x, products[:, rows, columns]], 1))
        return scores


def _clicks(device: str) -> Batch:
    places = torch.randint(100000, (4096, Ranking.TABLES, 4), device=device)
    return {"dense": torch.randn(4096, 13, device=device), "places": places}


def _ranked(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["dense"].to(next(model.parameters()).dtype), batch["places"])
    return F.binary_cross_entropy_with_logits(scores.float(), torch.ones_like(scores, dtype=torch.float32))


class Residual(nn.Module):
    """A block of a diffusion model: two convolutions after group norms, with the time embedding between them."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, channels), nn.GroupNorm(32, outputs)
        self.inner, self.outer = nn.Conv2d(channels, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.past = nn.Linear(256, outputs), nn.Conv2d(channels, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.inner(F.silu(self.first(x))) + self.time(F.silu(time))[:, :, None, None]
        result: Tensor = self.past(x) + self.outer(F.silu(self.second(inner)))
        return result


class Denoiser(nn.Module):
    """A small U-Net."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width), Residual(width, 2 * width), Residual(2 * width, 4 * width)])
        self.up = nn.ModuleList([Residual(6 * width, 2 * width), Residual(3 * width, width)])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first = self.down[0](self.enter(x), time)
        second = self.down[1](F.avg_pool2d(first, 2), time)
        x = self.down[2](F.avg_pool2d(second, 2), time)
        for block, skipped in zip(self.up, (second, first), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skipped], 1), time)
        result: Tensor = self.leave(x)
        return result


def _noise(device: str) -> Batch:
    return {"noise": torch.randn(8, 4, 64, 64, device=device), "time": torch.randn(8, 256, device=device)}


def _denoised(model: nn.Module, batch: Batch) -> Tensor:
    noise, time = (batch[name].to(next(model.parameters()).dtype) for name in ("noise", "time"))
    return F.mse_loss(model(noise, time).float(), noise.float())


def _images(name: str, make: str, rows: int) -> Model:
    return Model(f"zoo: {name} {rows}x224x224", partial(_of_timm, make), images(rows), _classified)


def _words(name: str, make: Callable[[], nn.Module], rows: int, length: int) -> Model:
    return Model(f"zoo: {name} {rows}x{length}", make, tokens(rows, length, WORDS), own_loss)


ZOO = (
    _images("ViT-B/16", "vit_base_patch16_224", 64),
    _images("Swin-T", "swin_tiny_patch4_window7_224", 64),
    _images("EfficientNet-B0", "efficientnet_b0", 128),
    _images("MobileNetV3-L", "mobilenetv3_large_100", 128),
    _images("Mixer-B/16", "mixer_b16_224", 64),
    _images("RegNetY-3.2", "regnety_032", 64),
    _words("Llama", partial(_of_transformers, "Llama", **DECODER), 2, 2048),
    _words("Gemma 2", partial(_of_transformers, "Gemma2", **DECODER, head_dim=128, sliding_window=512), 2, 2048),
    _words("Mixtral", partial(_of_transformers, "Mixtral", **{**DECODER, "num_hidden_layers": 2}), 2, 1024),
    _words(
        "T5", partial(_of_transformers, "T5", **ENCODER_DECODER, dropout_rate=0.0, decoder_start_token_id=0), 16, 256
    ),
    _words("DeBERTa-v2", partial(_of_transformers, "DebertaV2", **DISENTANGLED), 16, 256),
    Model("zoo: ranking 4096x26", Ranking, _clicks, _ranked),
    Model("zoo: U-Net 8x64x64", Denoiser, _noise, _denoised),
)

__all__ = ["ZOO"]
