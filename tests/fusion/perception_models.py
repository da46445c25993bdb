"""Models of transformers for images, sound and series, each as small as its parts allow: name → (model, inputs)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf

Built = tuple[torch.nn.Module, dict[str, object]]

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
PATCHES = {**SIZES, "image_size": 16, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
PYRAMID = {
    "num_encoder_blocks": 2,
    "hidden_sizes": [16, 24],
    "depths": [1, 1],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
SOUND = {
    **SIZES,
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
DETECTOR = {
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    },
    "d_model": 32,
    "num_queries": 5,
}


def image(model: str, config: Callable[[], object], size: int = 16) -> Callable[[], Built]:
    return lambda: (getattr(hf, model)(config()), {"pixel_values": torch.randn(2, 3, size, size)})


def sound(model: str, config: Callable[[], object]) -> Callable[[], Built]:
    return lambda: (getattr(hf, model)(config()), {"input_values": torch.randn(2, 160)})


def _masked_autoencoder() -> Built:
    config = hf.ViTMAEConfig(
        **PATCHES,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=48,
    )
    return hf.ViTMAEForPreTraining(config), {"pixel_values": torch.randn(2, 3, 16, 16), "noise": torch.rand(2, 4)}


def _detr() -> hf.DetrConfig:
    backbone = hf.ResNetConfig(embedding_size=8, **STAGES, out_features=["stage2"])
    return hf.DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone, **DETECTOR)


def _spectrogram() -> Built:
    strides = {"patch_size": 8, "frequency_stride": 8, "time_stride": 8}
    config = hf.ASTConfig(**SIZES, max_length=32, num_mel_bins=16, **strides)
    return hf.ASTModel(config), {"input_values": torch.randn(2, 32, 16)}


def _series() -> Built:
    patches = {"context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2}
    config = hf.PatchTSTConfig(**patches, d_model=16, num_attention_heads=2, num_hidden_layers=1, ffn_dim=32)
    return hf.PatchTSTModel(config), {"past_values": torch.randn(2, 32, 2)}


PERCEPTION_MODELS: dict[str, Callable[[], Built]] = {
    # images
    "beit": image("BeitModel", lambda: hf.BeitConfig(**PATCHES, vocab_size=101, use_relative_position_bias=True)),
    "convnextv2": image("ConvNextV2Model", lambda: hf.ConvNextV2Config(**STAGES, num_stages=2), 32),
    "deit": image("DeiTModel", lambda: hf.DeiTConfig(**PATCHES)),
    "detr": image("DetrModel", _detr, 32),
    "dinov2": image("Dinov2Model", lambda: hf.Dinov2Config(**PATCHES)),
    "poolformer": image(
        "PoolFormerModel",
        lambda: hf.PoolFormerConfig(
            **STAGES, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], num_encoder_blocks=2, mlp_ratio=2.0
        ),
        32,
    ),
    "pvt": image(
        "PvtModel",
        lambda: hf.PvtConfig(**PYRAMID, image_size=32, sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2]),
        32,
    ),
    "regnet": image("RegNetModel", lambda: hf.RegNetConfig(embedding_size=8, groups_width=8, **STAGES), 32),
    "segformer": image(
        "SegformerModel", lambda: hf.SegformerConfig(**PYRAMID, sr_ratios=[2, 1], patch_sizes=[7, 3]), 32
    ),
    "siglip": image("SiglipVisionModel", lambda: hf.SiglipVisionConfig(**PATCHES)),
    "swinv2": image(
        "Swinv2Model",
        lambda: hf.Swinv2Config(
            image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4
        ),
    ),
    "vit_mae": _masked_autoencoder,
    # sound
    "ast": _spectrogram,
    "hubert": sound("HubertModel", lambda: hf.HubertConfig(**SOUND)),
    "wav2vec2": sound("Wav2Vec2Model", lambda: hf.Wav2Vec2Config(**SOUND)),
    # series
    "patchtst": _series,
}
