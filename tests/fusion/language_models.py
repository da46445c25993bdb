"""Language models of transformers, each as small as its parts allow: name → (model, inputs)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf

Built = tuple[torch.nn.Module, dict[str, object]]

WORDS = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
DECODER = {**SIZES, **WORDS, "max_position_embeddings": 32}
GROUPED = {**DECODER, "num_key_value_heads": 2}
WINDOWED = {**GROUPED, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4}
GPT = {**WORDS, "n_layer": 1, "n_head": 4}
PAIRED = {
    **WORDS,
    "d_model": 32,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    },
}

EXPERTS = {"experts_implementation": "batched_mm"} if torch.__version__ < "2.13" else {}
"""In earlier releases the gradient of grouped products reads their offsets while it is traced."""


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 101, (2, length))


def encoder(model: str, config: Callable[[], object]) -> Callable[[], Built]:
    return lambda: (getattr(hf, model)(config()), {"input_ids": tokens(9)})


def decoder(model: str, config: Callable[[], object]) -> Callable[[], Built]:
    return lambda: (getattr(hf, model)(config()), {"input_ids": tokens(9), "use_cache": False})


def paired(model: str, config: Callable[[], object]) -> Callable[[], Built]:
    return lambda: (
        getattr(hf, model)(config()),
        {"input_ids": tokens(9), "decoder_input_ids": tokens(7), "use_cache": False},
    )


LANGUAGE_MODELS: dict[str, Callable[[], Built]] = {
    # encoders
    "albert": encoder("AlbertModel", lambda: hf.AlbertConfig(**SIZES, **WORDS, embedding_size=16)),
    "deberta": encoder(
        "DebertaV2Model",
        lambda: hf.DebertaV2Config(
            **SIZES,
            vocab_size=101,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            share_att_key=True,
        ),
    ),
    "electra": encoder("ElectraModel", lambda: hf.ElectraConfig(**SIZES, **WORDS, embedding_size=16)),
    "fnet": encoder(
        "FNetModel",
        lambda: hf.FNetConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1, intermediate_size=48),
    ),
    "modernbert": encoder(
        "ModernBertModel",
        lambda: hf.ModernBertConfig(**SIZES, **WORDS, cls_token_id=1, sep_token_id=2, local_attention=4),
    ),
    "roberta": encoder("RobertaModel", lambda: hf.RobertaConfig(**DECODER)),
    "xlnet": encoder("XLNetModel", lambda: hf.XLNetConfig(vocab_size=101, d_model=32, n_layer=1, n_head=4, d_inner=48)),
    # decoders
    "bloom": decoder("BloomForCausalLM", lambda: hf.BloomConfig(**GPT, hidden_size=32)),
    "cohere": decoder("CohereForCausalLM", lambda: hf.CohereConfig(**GROUPED)),
    "falcon": decoder(
        "FalconForCausalLM",
        lambda: hf.FalconConfig(**WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=4),
    ),
    "gemma2": decoder("Gemma2ForCausalLM", lambda: hf.Gemma2Config(**WINDOWED)),
    "gpt_neo": decoder(
        "GPTNeoForCausalLM",
        lambda: hf.GPTNeoConfig(
            **WORDS,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            max_position_embeddings=32,
        ),
    ),
    "gpt_neox": decoder("GPTNeoXForCausalLM", lambda: hf.GPTNeoXConfig(**DECODER)),
    "gptj": decoder("GPTJForCausalLM", lambda: hf.GPTJConfig(**GPT, n_embd=32, rotary_dim=4, n_positions=32)),
    "granite": decoder("GraniteForCausalLM", lambda: hf.GraniteConfig(**GROUPED)),
    "mamba2": decoder(
        "Mamba2ForCausalLM",
        lambda: hf.Mamba2Config(
            **WORDS,
            hidden_size=32,
            num_hidden_layers=1,
            state_size=8,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=8,
        ),
    ),
    "mixtral": decoder(
        "MixtralForCausalLM",
        lambda: hf.MixtralConfig(**GROUPED, **EXPERTS, num_local_experts=4, num_experts_per_tok=2),
    ),
    "olmo2": decoder("Olmo2ForCausalLM", lambda: hf.Olmo2Config(**GROUPED)),
    "opt": decoder(
        "OPTForCausalLM",
        lambda: hf.OPTConfig(
            **WORDS,
            hidden_size=32,
            num_hidden_layers=1,
            ffn_dim=48,
            num_attention_heads=4,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
        ),
    ),
    "phi": decoder("PhiForCausalLM", lambda: hf.PhiConfig(**GROUPED)),
    "qwen3": decoder("Qwen3ForCausalLM", lambda: hf.Qwen3Config(**GROUPED, head_dim=8)),
    "stablelm": decoder("StableLmForCausalLM", lambda: hf.StableLmConfig(**GROUPED, use_qkv_bias=True)),
    # both
    "bart": paired("BartModel", lambda: hf.BartConfig(**PAIRED)),
    "pegasus": paired("PegasusModel", lambda: hf.PegasusConfig(**PAIRED)),
}
