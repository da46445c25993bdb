"""Models whose decisions are recorded: real widths and batches, one layer or two of each kind, no weights.

They are built under a fake mode: parameters carry shapes, strides and dtypes alone.  Dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
Make = Callable[[], nn.Module]
Inputs = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its inputs.

    Attributes:
        dtype: of its parameters.
        backward: go backward from its loss, or from its first result.
        settings: attributes that are set on the module after its creation.
    """

    make: Make
    inputs: Inputs
    dtype: torch.dtype = BF16
    backward: bool = False
    settings: dict[str, object] = field(default_factory=dict)


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=I64)


def _words(rows: int, length: int, *, labels: bool = False, **more: tuple[int, int]) -> Inputs:
    def inputs() -> dict[str, Tensor]:
        ids = {"input_ids": _ids(rows, length), **({"labels": _ids(rows, length)} if labels else {})}
        return ids | {name: _ids(*shape) for name, shape in more.items()}

    return inputs


def _pixels(rows: int, size: int = 224, dtype: torch.dtype = BF16) -> Inputs:
    return lambda: {"pixel_values": torch.empty(rows, 3, size, size, dtype=dtype)}


class AlexNet(nn.Module):
    """Five convolutions with pooling, then three layers of products (Krizhevsky et al. 2012, one tower)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        self.classes = nn.Sequential(
            *(nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        scores: Tensor = self.classes(torch.flatten(self.features(pixel_values), 1))
        return scores


class Residual(nn.Module):
    """A block of a diffusion model: two convolutions behind group norms, and the time between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, channels), nn.GroupNorm(32, channels)
        self.inner, self.outer = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.time = nn.Linear(256, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.inner(F.silu(self.first(x))) + self.time(F.silu(time))[:, :, None, None]
        result: Tensor = x + self.outer(F.silu(self.second(inner)))
        return result


class Ranking(nn.Module):
    """A recommendation model: bags of embeddings, the products of their sums, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(100_000, 64, mode="sum") for _ in range(8)])
        self.above = nn.Sequential(nn.Linear(28, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, places: Tensor) -> Tensor:
        vectors = torch.stack([table(places[:, k]) for k, table in enumerate(self.tables)], 1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.tril_indices(8, 8, -1, device=places.device)
        scores: Tensor = self.above(products[:, rows, columns])
        return scores


LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "use_cache": False,
}
MISTRAL = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}
ENCODER = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, n_layer=1)
    return hf.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = hf.T5Config(d_model=768, d_kv=64, num_heads=12, d_ff=3072, num_layers=1, dropout_rate=0.0, use_cache=False)
    return hf.T5Model(config)


def _gemma2() -> nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**{**LLAMA, "vocab_size": 32000}, head_dim=128, sliding_window=512))


def _mamba() -> nn.Module:
    return hf.MambaModel(hf.MambaConfig(hidden_size=768, num_hidden_layers=1, vocab_size=50280, use_cache=False))


def _whisper() -> nn.Module:
    return hf.WhisperModel(hf.WhisperConfig(encoder_layers=1, decoder_layers=1, use_cache=False))


def _deberta() -> nn.Module:
    config = hf.DebertaV2Config(
        **ENCODER,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        relative_attention=True,
        position_buckets=256,
        pos_att_type=["p2c", "c2p"],
    )
    return hf.DebertaV2Model(config)


def _swin() -> nn.Module:
    return hf.SwinModel(hf.SwinConfig(depths=[2, 1], num_heads=[3, 6], drop_path_rate=0.0))


def _resnet() -> nn.Module:
    return hf.ResNetForImageClassification(hf.ResNetConfig(depths=[2, 1, 1, 1], num_labels=1000))


def _convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(depths=[1, 1, 1, 1], num_labels=1000))


def _diffusion_inputs() -> dict[str, Tensor]:
    return {"x": torch.empty(8, 256, 64, 64, dtype=BF16), "time": torch.empty(8, 256, dtype=BF16)}


CAUSAL_LOSS: dict[str, object] = {"loss_type": "ForCausalLM"}

MODELS: dict[str, Model] = {
    "alexnet_float32": Model(AlexNet, _pixels(1024, dtype=F32), F32),
    "bert": Model(lambda: hf.BertModel(hf.BertConfig(**ENCODER)), _words(16, 512)),
    "bert_training": Model(
        lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER)), _words(16, 512, labels=True), backward=True
    ),
    "clip": Model(lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(num_hidden_layers=1)), _pixels(64)),
    "convnext": Model(_convnext, _pixels(64)),
    "deberta": Model(_deberta, _words(16, 256)),
    "distilbert": Model(lambda: hf.DistilBertModel(hf.DistilBertConfig(n_layers=1, dropout=0.0)), _words(16, 512)),
    "gemma2": Model(_gemma2, _words(2, 2048)),
    "gpt2": Model(_gpt2, _words(8, 1024)),
    "gpt2_training": Model(_gpt2, _words(8, 1024, labels=True), backward=True, settings=CAUSAL_LOSS),
    "llama": Model(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), _words(4, 2048)),
    "llama_training": Model(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
        _words(4, 2048, labels=True),
        backward=True,
        settings=CAUSAL_LOSS,
    ),
    "mamba": Model(_mamba, _words(4, 8)),
    "mistral": Model(lambda: hf.MistralModel(hf.MistralConfig(**MISTRAL, sliding_window=1024)), _words(1, 4096)),
    "ranking": Model(Ranking, lambda: {"places": _ids(4096, 8, 4)}),
    "residual_block_training": Model(lambda: Residual(256), _diffusion_inputs, backward=True),
    "resnet": Model(_resnet, _pixels(64)),
    "swin": Model(_swin, _pixels(64)),
    "t5": Model(_t5, _words(8, 512, decoder_input_ids=(8, 512))),
    "vit": Model(lambda: hf.ViTModel(hf.ViTConfig(**ENCODER)), _pixels(64)),
    "vit_training": Model(lambda: hf.ViTModel(hf.ViTConfig(**ENCODER)), _pixels(64), backward=True),
    "whisper": Model(
        _whisper,
        lambda: {"input_features": torch.empty(8, 80, 3000, dtype=BF16), "decoder_input_ids": _ids(8, 448)},
    ),
}
