"""From a plain function to PTX, on a machine that need not have a GPU.

    python examples/aot_ptx.py [FOLDER]

Prints the stations of one kernel on its way: block program, Triton source, Triton's IR, PTX.  With a FOLDER every
artefact is also written there.
"""

import sys

import torch

import fusion


def rms_norm(x, weight):
    scale = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + 1e-6)
    return (x * scale).to(x.dtype) * weight


def main():
    # Only shapes and dtypes matter: nothing is run, and the tensors stand for tensors on the GPU.
    x, weight = torch.empty(4096, 2048, dtype=torch.bfloat16), torch.empty(2048, dtype=torch.bfloat16)
    export = fusion.export_kernels(rms_norm, x, weight, target="triton", arch="sm_90")
    print(f"steps: {', '.join(export.steps)}")
    assert len(export.steps) == 1, export.steps
    (kernel,) = export.kernels

    print(f"\n--- the block program: expressions over named axes ---\n{kernel.text}")
    print(f"\n--- the Triton source ---\n{kernel.source}")
    for suffix, content in kernel.artefacts.items():
        size = f"{len(content):,} bytes" if isinstance(content, bytes) else f"{len(content.splitlines()):,} lines"
        print(f"--- .{suffix}: {size} ---")
    ptx = kernel.artefacts["ptx"]
    assert ".target sm_90" in ptx
    wide = [line.strip() for line in ptx.splitlines() if "ld.global" in line]
    print(f"\nThe PTX loads from memory {len(wide)} times; first\n  {wide[0]}")

    if len(sys.argv) > 1:
        for path in export.write(sys.argv[1]):
            print(path)


if __name__ == "__main__":
    main()
