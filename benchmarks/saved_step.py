"""Makes a step of a language model a saved program, as it is shipped: `fusion.save`, then `fusion.load`.

The keys and values of earlier tokens, and their number, are buffers of the program that it changes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusion
from benchmarks.harness import Refused


class Step(nn.Module):
    """The logits after the last of some tokens, which follow those in the cache."""

    length: Tensor

    def __init__(self, model: nn.Module, cache: Any, before: int) -> None:
        super().__init__()
        self.model, self.layers, self.longest = model, len(cache.layers), cache.layers[0].max_cache_len
        self.register_buffer("length", torch.tensor(before, dtype=torch.int64))
        for number, layer in enumerate(cache.layers):
            self.register_buffer(f"keys_{number}", layer.keys)
            self.register_buffer(f"values_{number}", layer.values)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits, [1, 1, vocabulary], and count the tokens."""
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=self.longest)
        for number, layer in enumerate(cache.layers):
            keys, values = self.get_buffer(f"keys_{number}"), self.get_buffer(f"values_{number}")
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, self.length.clone()
        result: Tensor = self.model(words, past_key_values=cache, logits_to_keep=1).logits
        self.length.add_(words.shape[1])
        return result


def saved_call(model: nn.Module, cache: Any, words: Tensor, before: int) -> Callable[[], Tensor]:
    """Return a call of a saved program, always at the same position: after `before` tokens in the cache.

    Raises:
        FusionError: a part of the program cannot be saved.
        Refused: the program has no generated kernel.
    """
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "step.fusion"
        exported = torch.export.export(Step(model, cache, before).eval(), (words,), strict=False)
        fusion.save(exported, path, inputs=(words,))
        loaded = fusion.load(path)
    if not loaded.manifest["kernels"]:
        raise Refused("the saved program has no generated kernel")
    length = loaded.state_dict()["length"]

    def call() -> Tensor:
        length.fill_(before)
        with torch.no_grad():
            result: Tensor = loaded(words)
        return result

    return call
