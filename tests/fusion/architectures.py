"""Architectures of transformers, built small from their configurations, and of timm and torchvision where these are
installed: name → (model, inputs).

No weights are loaded; dropout is off, so that two runs of a training step agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import transformers as hf

from tests.fusion.language_models import LANGUAGE_MODELS
from tests.fusion.perception_models import PERCEPTION_MODELS
from tests.fusion.vision_models import VISION_MODELS

TEXT = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
IMAGE = {**TEXT, "image_size": 32, "patch_size": 8}
GROUPED = {**TEXT, "num_key_value_heads": 2, "vocab_size": 101}


def _tokens(length: int = 19) -> torch.Tensor:
    return torch.randint(0, 101, (2, length))


def _image(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


def _gpt2() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.GPT2Config(
        n_embd=64, n_head=4, n_layer=2, vocab_size=101, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config), {"input_ids": _tokens(), "use_cache": False}


def _bert() -> tuple[torch.nn.Module, dict[str, object]]:
    return hf.BertModel(hf.BertConfig(vocab_size=101, **TEXT)), {"input_ids": _tokens()}


def _llama() -> tuple[torch.nn.Module, dict[str, object]]:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), {"input_ids": _tokens(), "use_cache": False}


def _t5() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.T5Config(d_model=64, d_kv=16, num_heads=4, num_layers=2, d_ff=128, vocab_size=101)
    return hf.T5Model(config), {"input_ids": _tokens(), "decoder_input_ids": _tokens(11), "use_cache": False}


def _vit() -> tuple[torch.nn.Module, dict[str, object]]:
    return hf.ViTModel(hf.ViTConfig(**IMAGE)), {"pixel_values": _image()}


def _convnext() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.ConvNextConfig(hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 2, 1])
    return hf.ConvNextModel(config), {"pixel_values": _image(64)}


def _mamba() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=101, state_size=8)
    return hf.MambaModel(config), {"input_ids": _tokens(), "use_cache": False}


def _whisper() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.WhisperConfig(
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=101,
        max_source_positions=50,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": torch.randn(2, 80, 100), "decoder_input_ids": _tokens(11), "use_cache": False}
    return hf.WhisperModel(config), inputs


def _qwen2() -> tuple[torch.nn.Module, dict[str, object]]:
    return hf.Qwen2Model(hf.Qwen2Config(**GROUPED)), {"input_ids": _tokens(), "use_cache": False}


def _mistral() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.MistralConfig(sliding_window=7, **GROUPED)
    return hf.MistralModel(config), {"input_ids": _tokens(), "use_cache": False}


def _clip() -> tuple[torch.nn.Module, dict[str, object]]:
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(**IMAGE)), {"pixel_values": _image()}


def _distilbert() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.DistilBertConfig(dim=64, n_heads=4, n_layers=2, hidden_dim=128, vocab_size=101)
    return hf.DistilBertModel(config), {"input_ids": _tokens()}


def _swin() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0
    )
    return hf.SwinModel(config), {"pixel_values": _image()}


def _resnet() -> tuple[torch.nn.Module, dict[str, object]]:
    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1])
    return hf.ResNetModel(config), {"pixel_values": _image(64)}


ARCHITECTURES: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, object]]]] = {
    "bert": _bert,
    "clip": _clip,
    "convnext": _convnext,
    "distilbert": _distilbert,
    "gpt2": _gpt2,
    "llama": _llama,
    "mamba": _mamba,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "resnet": _resnet,
    "swin": _swin,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    **LANGUAGE_MODELS,
    **PERCEPTION_MODELS,
    **VISION_MODELS,
}
SLOW = frozenset(
    {"beit", "cohere", "deit", "detr", "gemma2", "gptj", "granite", "hubert"}
    | {"mamba2", "patchtst", "pegasus", "pvt", "qwen3", "regnet", "siglip", "swinv2"}
    | {"albert", "bart", "bloom", "convnextv2", "deberta", "segformer", "swin", "vit_mae"}
    | set(VISION_MODELS)
    | {"electra", "falcon", "gpt_neo", "mistral", "modernbert", "olmo2", "phi", "poolformer", "stablelm", "xlnet"}
)
"""Architectures that take longest, or cover little that others do not."""


def in_double(model: torch.nn.Module, inputs: dict[str, object]) -> tuple[torch.nn.Module, dict[str, object]]:
    """Copies that compute in float64; mixtures of experts in the form that exists there."""
    exact = copy.deepcopy(model).double()
    if getattr(getattr(exact, "config", None), "_experts_implementation", None) == "grouped_mm":
        exact.set_experts_implementation("eager")
    wide = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    return exact, wide


def build(name: str) -> tuple[torch.nn.Module, dict[str, object]]:
    """The architecture called `name` in training mode without dropout, and inputs for it."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for key, value in list(vars(module).items()):
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    return model.train(), inputs
