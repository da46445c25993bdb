"""Twenty models, two layers of most, small on a CPU, in usual widths on a GPU: for prices, and whole.

Random weights, and no random operations.  Models of `transformers` are left out where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Batch
from benchmarks.zoo import Denoiser, Ranking, Residual

WORDS = 8192


@dataclass(frozen=True)
class Model:
    """A model, its inputs by name on a device, and whether its gradients are computed, too."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[str], Batch]
    training: bool = False


class AlexNet(nn.Module):
    """Convolutions with pooling, then layers of products (Krizhevsky et al. 2012, one tower)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        self.classes = nn.Sequential(nn.Linear(9216, 1024), nn.ReLU(), nn.Linear(1024, 1000))

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.classes(torch.flatten(self.features(pixels), 1))
        return scores


class Bottleneck(nn.Module):
    """A block of ResNet-50: three convolutions with batch norms, and the shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 4
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class ResNet(nn.Module):
    """A stem, some blocks, and a classifier."""

    def __init__(self, channels: int, blocks: int = 2) -> None:
        super().__init__()
        stem = nn.Conv2d(3, channels, 7, 2, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(*stem, *(Bottleneck(channels) for _ in range(blocks)))
        self.classes = nn.Linear(channels, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.classes(self.layers(pixels).mean((2, 3)))
        return scores


class Mixer(nn.Module):
    """Layers that mix positions, then channels, each by a perceptron (Tolstikhin et al. 2021)."""

    def __init__(self, length: int, width: int, layers: int = 2) -> None:
        super().__init__()

        def perceptron(size: int) -> nn.Module:
            return nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * layers)])
        self.mixers = nn.ModuleList([perceptron((length, width)[k % 2]) for k in range(2 * layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        for k, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            inner = norm(tokens)
            tokens = tokens + (mixer(inner) if k % 2 else mixer(inner.transpose(1, 2)).transpose(1, 2))
        return tokens


class Decoder(nn.Module):
    """Causal transformer layers with RMS norms, rotated heads and gated perceptrons, and the words' scores."""

    def __init__(self, width: int, heads: int, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.table = heads, nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList([self._layer(width) for _ in range(layers)])
        self.norm, self.scores = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    @staticmethod
    def _layer(width: int) -> nn.ModuleDict:
        inner = 8 * width // 3 // 64 * 64
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 2 * inner), "down": (inner, width)}
        parts: dict[str, nn.Module] = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        return nn.ModuleDict({**parts, "first": nn.RMSNorm(width), "second": nn.RMSNorm(width)})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        length, half = x.shape[1], x.shape[2] // self.heads // 2
        angle = torch.arange(length, device=x.device)[:, None] * 10_000 ** -(torch.arange(half, device=x.device) / half)
        cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angle.cos(), angle.sin()))
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            q, k, v = layer["qkv"](layer["first"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            q, k = (y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin for y in (q, k))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](seen.transpose(1, 2).flatten(2))
            gate, up = layer["up"](layer["second"](x)).chunk(2, -1)
            x = x + layer["down"](F.silu(gate) * up)
        scores: Tensor = self.scores(self.norm(x))
        return scores


class Denoised(nn.Module):
    """The U-Net, called with one tensor a name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = Denoiser(width)

    def forward(self, noise: Tensor, time: Tensor) -> Tensor:
        result: Tensor = self.net(noise, time)
        return result


def _encoder(width: int, heads: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _of_transformers(name: str, kind: str, **settings: object) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
    return model


def _normal(**shapes: tuple[int, ...]) -> Callable[[str], Batch]:
    return lambda device: {name: torch.randn(shape, device=device) for name, shape in shapes.items()}


def _words(rows: int, length: int, *names: str) -> Callable[[str], Batch]:
    def batch(device: str) -> Batch:
        return {name: torch.randint(WORDS, (rows, length), device=device) for name in names or ("input_ids",)}

    return batch


def _places(rows: int) -> Callable[[str], Batch]:
    def batch(device: str) -> Batch:
        places = torch.randint(100_000, (rows, Ranking.TABLES, 4), device=device)
        return {"dense": torch.randn(rows, 13, device=device), "places": places}

    return batch


def models(device: str) -> tuple[Model, ...]:
    """Return the models at the sizes of a device; those in plain PyTorch and of `transformers` in turn."""
    gpu = device == "cuda"
    own, others = _in_plain_pytorch(gpu), _of_the_library(gpu) if find_spec("transformers") else ()
    return tuple(model for pair in zip(own, others or own, strict=True) for model in dict.fromkeys(pair))


def _in_plain_pytorch(gpu: bool) -> tuple[Model, ...]:
    width, heads, rows, length = (1024, 16, 8, 1024) if gpu else (256, 4, 2, 128)
    size = 224 if gpu else 64
    pixels = _normal(pixels=(64 if gpu else 8, 3, size, size))
    channels = 256 if gpu else 64
    image = (16, channels, 56, 56) if gpu else (2, channels, 28, 28)
    noise = _normal(noise=(8, 4, 64, 64) if gpu else (1, 4, 32, 32), time=(8, 256) if gpu else (1, 256))
    tokens = _normal(src=(rows, length, width))
    resnet, decoder = partial(ResNet, channels), partial(Decoder, width, heads)
    return (
        Model("decoder", decoder, _words(rows, length, "ids")),
        Model("decoder, training", decoder, _words(rows, length, "ids"), training=True),
        Model("encoder", partial(_encoder, width, heads), tokens),
        Model("residual block", partial(Residual, channels, channels), _normal(x=image, time=(image[0], 256))),
        Model("ResNet", resnet, pixels),
        Model("ResNet, training", resnet, pixels, training=True),
        Model("Mixer", partial(Mixer, length, width), _normal(tokens=(rows, length, width))),
        Model("U-Net", partial(Denoised, 128 if gpu else 32), noise),
        Model("ranking", Ranking, _places(4096 if gpu else 256)),
        Model("AlexNet", AlexNet, _normal(pixels=(128 if gpu else 4, 3, 224, 224))),
    )


def _of_the_library(gpu: bool) -> tuple[Model, ...]:
    width, heads, inner, rows, length = (1024, 16, 4096, 8, 1024) if gpu else (256, 4, 1024, 2, 128)
    size = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner, "num_hidden_layers": 2}
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = {"vocab_size": WORDS, "max_position_embeddings": length}
    decoding = {"vocab_size": WORDS, "use_cache": False, "num_key_value_heads": heads // 4}
    pixels = {"image_size": 224 if gpu else 64}
    images = _normal(pixel_values=(32 if gpu else 4, 3, pixels["image_size"], pixels["image_size"]))
    gpt2: dict[str, object] = {"vocab_size": WORDS, "n_embd": width, "n_head": heads, "n_layer": 2, "use_cache": False}
    gpt2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    t5: dict[str, object] = {
        "vocab_size": WORDS,
        "d_model": width,
        "d_ff": inner,
        "d_kv": width // heads,
        "num_heads": heads,
    }
    t5 |= {"num_layers": 2, "dropout_rate": 0.0, "use_cache": False}
    relative = {"relative_attention": True, "position_buckets": 64, "pos_att_type": ["p2c", "c2p"]}
    of, words = partial(partial, _of_transformers), _words(rows, length)
    return (
        Model("GPT-2", of("GPT2", "LMHeadModel", **gpt2), words),
        Model("GPT-2, training", of("GPT2", "LMHeadModel", **gpt2), words, training=True),
        Model("BERT", of("Bert", "Model", **text, **size, **calm), words),
        Model("BERT, training", of("Bert", "Model", **text, **size, **calm), words, training=True),
        Model("Llama", of("Llama", "ForCausalLM", **size, **decoding), words),
        Model("Gemma 2", of("Gemma2", "ForCausalLM", **size, **decoding, head_dim=64, sliding_window=256), words),
        Model("T5", of("T5", "Model", **t5), _words(rows, length, "input_ids", "decoder_input_ids")),
        Model("DeBERTa", of("DebertaV2", "Model", **text, **size, **calm, **relative), words),
        Model("ViT", of("ViT", "Model", **size, **calm, **pixels), images),
        Model("ConvNeXt", of("ConvNext", "Model", depths=[1, 1, 1, 1], **pixels), images),
    )
