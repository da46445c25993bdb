"""Vector addition: the smallest kernel there is, at lengths that no block divides.

    python examples/vector_add.py

For any block size, the last block is ragged: 7 elements in blocks of 4, 98,432 in blocks of 1,024.  The program has no
mask; it follows from the bounds of the axis.
"""

import torch

import fusion


def add(x, y):
    return x + y


def main():
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    fused = fusion.fuse(add, dynamic=False)
    for n in (7, 98_432):
        x, y = torch.rand(n), torch.rand(n)
        torch.testing.assert_close(fused(x, y), add(x, y), rtol=0, atol=0)
        print(f"n = {n:6,}: equal to eager in every bit")

    explanation = fusion.explain(add)(torch.rand(98_432), torch.rand(98_432))
    assert len(explanation.kernels) == 1, explanation
    assert not explanation.externs, explanation
    kernel = explanation.kernels[0]
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * 4 * 98_432, 4 * 98_432)
    print(f"one kernel, {kernel.bytes_read:,} bytes read, {kernel.bytes_written:,} written:\n\n{kernel.source}")


if __name__ == "__main__":
    main()
