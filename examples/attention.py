"""Attention written out, with a mask of one's own: one loop over the keys, forward and backward.

    python examples/attention.py

Nothing in Fusion knows attention.  The scores are a product over a short axis, so they are computed where they are
read; the row maximum and the sum of exponentials become running values by the online rule.  No tensor of queries × keys
reaches memory, and blocks that the mask excludes are skipped.  Where so few queries leave a device idle, the loop is
split into parts, and a second kernel merges them.
"""

import math

import torch

import fusion


def attention(q, k, v):
    """Causal, within a window of 256 keys, nearer keys preferred, and scores that saturate."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    j = torch.arange(k.shape[-2], device=q.device)[None, :]
    scores = 30 * torch.tanh(scores / 30) - 0.1 * (i - j)
    scores = scores.masked_fill((j > i) | (i - j >= 256), float("-inf"))
    return torch.softmax(scores, -1) @ v


def gradients(function, *inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    function(*leaves).square().sum().backward()
    return [x.grad for x in leaves]


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 4, 1000, 64, device=device) for _ in range(3))

    explanation = fusion.explain(attention)(q, k, v)
    print(explanation)
    scores = 4 * 1000 * 1000 * q.element_size()
    assert not explanation.externs and explanation.traffic_after.total < scores, (
        "no tensor of queries × keys goes through memory"
    )
    print(f"\n{explanation.kernels[0].source}")

    fused, exact = fusion.fuse(attention), attention(q.double(), k.double(), v.double())
    errors = [(f(q, k, v).double() - exact).abs().max().item() for f in (attention, fused)]
    assert errors[1] <= 2 * errors[0] + 1e-6, errors
    print(f"on {device}: error {errors[1]:.1e}, eager's {errors[0]:.1e}, against float64")

    wanted = gradients(attention, q.double(), k.double(), v.double())
    worst = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(gradients(fused, q, k, v), wanted, strict=True)
    )
    assert worst < 1e-4, worst
    print(f"gradients agree with float64 to {worst:.0e}; backward recomputes the tiles from two numbers per row")


if __name__ == "__main__":
    main()
