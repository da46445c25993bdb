"""A matrix product with its activation: one kernel where products are generated, a library call and a kernel elsewhere.

    python examples/matmul_relu.py

On a GPU the product runs on the matrix units and the activation is its epilogue, applied before the tile leaves the
registers.  On a CPU the library multiplies.  Without a GPU the Triton kernel is generated all the same, down to PTX.
"""

import torch
import torch.nn.functional as F

import fusion


def matmul_relu(a, b):
    return torch.relu(a @ b)


def matmul_leaky_relu(a, b):
    return F.leaky_relu(a @ b, 0.01)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    a, b = torch.randn(512, 256, device=device, dtype=dtype), torch.randn(256, 384, device=device, dtype=dtype)

    for program in (matmul_relu, matmul_leaky_relu):
        exact = program(a.double(), b.double())
        errors = [(f(a, b).double() - exact).abs().max().item() for f in (program, fusion.fuse(program))]
        assert errors[1] <= 2 * errors[0] + 1e-6, errors
        print(f"{program.__name__} on {device}: error {errors[1]:.1e}, eager's {errors[0]:.1e}, against float64")
        print(fusion.explain(program)(a, b), end="\n\n")

    halves = torch.empty(512, 256, dtype=torch.float16), torch.empty(256, 384, dtype=torch.float16)
    export = fusion.export_kernels(matmul_leaky_relu, *halves, target="triton", arch="sm_90")
    assert len(export.steps) == 1, export.steps
    (kernel,) = export.kernels
    print(f"For a GPU, one kernel does both:\n\n{kernel.source}")
    ptx = kernel.artefacts["ptx"].splitlines()
    products = [line.strip() for line in ptx if "wgmma.mma_async" in line or "mma.sync" in line]
    assert products, "the product does not run on the matrix units"
    print(f"Its PTX has {len(ptx)} lines; the matrix units are used {len(products)} times, first by\n  {products[0]}")


if __name__ == "__main__":
    main()
