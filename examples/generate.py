"""Generates tokens with a small Llama-like model: a prompt at once, then token by token, with a cache of fixed size.

    python examples/generate.py [--bits 8|4] [--tokens N]

The weights are random, so the text means nothing; the time of a token is that of reading them.  Both functions are
compiled once.  The step updates the cache in place, and draws the next token with a temperature among the k likeliest.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

WORDS, WIDTH, HIDDEN, LAYERS, HEADS, KEYS, LONGEST = 2048, 512, 1408, 2, 8, 2, 256
HEAD = WIDTH // HEADS


def turned(x: Tensor, at: Tensor) -> Tensor:  # x [rows, heads, HEAD], at [rows]
    angles = at[:, None, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.queries, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys, self.values = (nn.Linear(WIDTH, KEYS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("cache", torch.zeros(2, KEYS, LONGEST, HEAD))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:  # x [rows, WIDTH], at [rows]
        rows = self.before(x)
        queries, keys = (turned(f(rows).unflatten(-1, (-1, HEAD)), at) for f in (self.queries, self.keys))
        new = torch.stack((keys, self.values(rows).view(-1, KEYS, HEAD)))  # [2, rows, KEYS, HEAD]
        self.cache.index_copy_(2, at, new.transpose(1, 2))
        visible = torch.arange(LONGEST) <= at[:, None]
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], *self.cache[:, None], attn_mask=visible, enable_gqa=True
        )
        x = x + self.out(mixed[0].transpose(0, 1).reshape(-1, WIDTH))
        rows = self.between(x)
        return x + self.down(F.silu(self.gate(rows)) * self.up(rows))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:  # → the scores of the words after the last token
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, at)
        return self.head(self.norm(x[-1:]))[0].float()


def drawn(scores: Tensor, temperature: float, among: int) -> Tensor:  # → one token, of shape [1]
    likeliest, words = scores.topk(among)
    chances = torch.softmax(likeliest / temperature, -1)
    noise = -torch.rand_like(chances).clamp_min(1e-20).log()  # the largest of chance / noise is drawn by its chance
    return words.gather(0, (chances / noise).argmax(0, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of quantised weights")
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Model().bfloat16().eval()
    if arguments.bits:
        fusion.quantize_weights(model, bits=arguments.bits, group=64)
    fused = fusion.fuse(lambda token, at: drawn(model(token, at), temperature=0.8, among=50))
    prompt = torch.randint(WORDS, (24,))
    with torch.inference_mode():
        token, at = fused(prompt, torch.arange(24)), torch.tensor([24])
        tokens, began = [token], time.perf_counter()
        for count in range(1, arguments.tokens):
            token = fused(token, at)
            tokens, at = [*tokens, token], at + 1
            if count == 2:  # the step is compiled by now
                began = time.perf_counter()
    seconds = (time.perf_counter() - began) / max(1, arguments.tokens - 3)
    print(*torch.cat(tokens).tolist())
    print(f"{1 / seconds:.0f} tokens/s; {len(fusion.report(fused).graphs)} graphs were compiled")


if __name__ == "__main__":
    main()
