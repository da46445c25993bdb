"""Kernels in C, launched and compared with the reference evaluator."""

from __future__ import annotations

import torch

from fusion.lowering.indexing import axis_symbol, over_symbol
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.verify import verify_kernel
from tests.codegen.c.kernels import TARGET
from tests.codegen.kernels.making import assert_same, expected, tensors

b, i, j, g = (axis_symbol(k) for k in range(4))


d, e, s, u, w = (over_symbol(k) for k in range(5))


I32, I8 = torch.int32, torch.int8


def check(kernel: Kernel, given: list[torch.Tensor] | None = None, sizes: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Run `kernel`, compare its results with the evaluator's, and return the tensors after the launch."""
    verify_kernel(kernel)
    known = dict(zip(kernel.sizes, sizes, strict=True))
    given = tensors(kernel, sizes=known) if given is None else given
    source = TARGET.emit(kernel)
    assert source == TARGET.emit(kernel)
    got = [tensor.clone() for tensor in given]
    TARGET.build(kernel, source)(*got, *sizes)
    assert_same(kernel, got, expected(kernel, given, sizes), factor=4.0)
    return got
