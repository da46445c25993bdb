"""An activation that no library has, inside a transformer block.

    python examples/custom_activation.py

Nothing in the compiler knows this function.  It is a handful of pointwise operations, so it becomes part of a
neighbouring kernel, and costs no memory traffic of its own.
"""

import copy

import torch
from torch import nn

import fusion


def bent(x):
    """Linear far out, smooth and slightly negative around zero."""
    return x * torch.sigmoid(1.5 * x) + 0.1 * torch.sin(x) / (1 + x * x)


class Block(nn.Module):
    """Attention and a two-layer network with `bent` between, each after a LayerNorm and with a residual connection."""

    def __init__(self, width=128, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # [batch, tokens, width]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, tokens, width of a head]
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        weights = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        x = x + self.project((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(bent(self.up(self.norms[1](x))))


@torch.no_grad()
def main():
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    block, x = Block().eval(), torch.randn(2, 64, 128)

    exact = copy.deepcopy(block).double()(x.double())
    errors = [(f(x).double() - exact).abs().max().item() for f in (block, fusion.fuse(block))]
    assert errors[1] <= 2 * errors[0] + 1e-6, errors
    print(f"error against float64: {errors[1]:.1e}, eager's is {errors[0]:.1e}\n")

    explanation = fusion.explain(block)(x)
    homes = [
        kernel for kernel in explanation.kernels if any(origin.name.startswith("sin") for origin in kernel.origins)
    ]
    assert len(homes) == 1, "the activation is not in one kernel"
    kernels, calls = len(explanation.kernels), len(explanation.externs)
    print(f"{kernels} kernels, {calls} library calls. The activation lives in {homes[0].name}:")
    for origin in homes[0].origins:
        print(f"  {origin}")


if __name__ == "__main__":
    main()
