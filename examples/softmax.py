"""Softmax in five lines of PyTorch, and the traffic that fusing them saves.

    python examples/softmax.py

Eagerly each line is a kernel of its own that reads its inputs from memory and writes its result there.  On an M × N
matrix that is 5MN + 2M elements read and 3MN + 2M written.  Fused, a row is loaded once and stored once: MN and MN.
"""

import torch

import fusion


def naive_softmax(x):
    row_max = x.amax(dim=1)  # reads MN, writes M
    shifted = x - row_max[:, None]  # reads MN + M, writes MN
    numerator = torch.exp(shifted)  # reads MN, writes MN
    denominator = numerator.sum(dim=1)  # reads MN, writes M
    return numerator / denominator[:, None]  # reads MN + M, writes MN


def main():
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    M, N = 1823, 781
    x = torch.randn(M, N)

    result = fusion.fuse(naive_softmax)(x)
    torch.testing.assert_close(result, torch.softmax(x, dim=1))
    print(f"softmax of {M} × {N}: agrees with torch.softmax")

    explanation = fusion.explain(naive_softmax)(x)
    before, after = explanation.traffic_before, explanation.traffic_after
    assert len(explanation.kernels) == 1, explanation
    assert not explanation.externs, explanation
    assert (before.read, before.written) == (4 * (5 * M * N + 2 * M), 4 * (3 * M * N + 2 * M)), before
    assert (after.read, after.written) == (4 * M * N, 4 * M * N), after
    print(f"eager: 5 kernels, reads {before.read:,} bytes, writes {before.written:,}")
    print(f"fused: 1 kernel,  reads {after.read:,} bytes, writes {after.written:,}")
    print(f"{before.total / after.total:.1f} times less traffic\n\n{explanation.kernels[0].source}")


if __name__ == "__main__":
    main()
