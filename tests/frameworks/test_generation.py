"""`generate` of transformers: the tokens of eager, few compilations, no graph breaks, and a cache changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fusion

transformers = pytest.importorskip("transformers")

LONG = 256
"""Tokens that are generated."""

WORDS = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def gpt2() -> Any:
    config = transformers.GPT2Config(**WORDS, n_layer=1, n_embd=64, n_head=2, n_positions=512)
    return transformers.GPT2LMHeadModel(config).eval()


def llama() -> Any:
    config = transformers.LlamaConfig(
        **WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_256_tokens_take_three_compilations(build: Callable[[], Any], cache: str) -> None:
    """The prompt, one token, and one token after a cache of any length; a static cache needs the first two."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    tokens = torch.randint(1, 512, (1, 32))
    settings = {"max_new_tokens": LONG, "do_sample": False}
    theirs = model.generate(tokens, **settings)
    fused = fusion.fuse(model, options={"strict": True})
    counters.clear()
    ours = fused.generate(tokens, **settings, cache_implementation=None if cache == "dynamic" else "static")
    assert torch.equal(ours, theirs) and ours.shape == (1, 32 + LONG)
    assert counters["stats"]["unique_graphs"] == (3 if cache == "dynamic" else 2)
    report = fusion.report(fused)
    assert not report.graph_breaks
    fused.generate(tokens, **settings, cache_implementation=None if cache == "dynamic" else "static")
    assert counters["stats"]["unique_graphs"] == (3 if cache == "dynamic" else 2)  # a second time nothing is compiled


def test_prompts_of_a_batch_are_padded() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = llama()
    tokens, mask = torch.randint(1, 512, (3, 20)), torch.ones(3, 20, dtype=torch.int64)
    tokens[0, :5], mask[0, :5] = 0, 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    fused = fusion.fuse(model, options={"strict": True})
    assert torch.equal(fused.generate(tokens, **settings), model.generate(tokens, **settings))


def test_a_static_cache_is_changed_in_place() -> None:
    """A step writes the rows of one token, and no copy of a cache."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = llama()
    cache = transformers.StaticCache(config=model.config, max_cache_len=128)
    words = torch.randint(1, 512, (1, 9))
    fused = fusion.fuse(model, options={"strict": True})
    with torch.no_grad():
        fused(words[:, :8], past_key_values=cache)
        where = [layer.keys.data_ptr() for layer in cache.layers]
        before = [layer.keys.clone() for layer in cache.layers]
        step = fused(words[:, 8:], past_key_values=cache).logits
        torch.testing.assert_close(step[:, -1], model(words).logits[:, -1])
    assert [layer.keys.data_ptr() for layer in cache.layers] == where
    for layer, old in zip(cache.layers, before, strict=True):
        changed = (layer.keys != old).any(-1).any(1)[0]
        assert changed.nonzero().flatten().tolist() == [8]
    whole = cache.layers[0].keys.nbytes
    updates = [kernel for kernel in fusion.report(fused).graphs[-1].kernels if "index_copy" in kernel.name]
    assert updates and all(kernel.bytes_written < whole for kernel in updates)
