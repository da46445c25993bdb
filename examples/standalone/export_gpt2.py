"""Exports a small GPT-2 with random weights as a library, and prints the tokens that eager generates.

python examples/standalone/export_gpt2.py FOLDER NUMBER TOKEN...
"""

import sys
from pathlib import Path

import torch
from torch.export import Dim
from transformers import GPT2Config, GPT2LMHeadModel

import fusion

torch.manual_seed(0)
CONFIG = GPT2Config(
    n_layer=2,
    n_head=4,
    n_embd=64,
    vocab_size=211,
    n_positions=64,
    bos_token_id=0,
    eos_token_id=0,
    initializer_range=0.3,  # weights so large that tokens differ
    tie_word_embeddings=False,
)


class Scores(torch.nn.Module):
    """Returns the scores of each word at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(CONFIG)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


folder, number, *prompt = sys.argv[1], *map(int, sys.argv[2:] or (8, 1, 2, 3))
scores = Scores().eval()
Path(folder).mkdir(parents=True, exist_ok=True)
example = torch.tensor([prompt])
fusion.export_library(
    scores, f"{folder}/libmodel.so", inputs=(example,), dynamic_shapes=({1: Dim("length", max=CONFIG.n_positions)},)
)

tokens = example
with torch.no_grad():
    for _ in range(number):
        tokens = torch.cat([tokens, scores(tokens)[:, -1:].argmax(-1)], 1)
        print(int(tokens[0, -1]))
