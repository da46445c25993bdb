"""Kernels built for the device of the machine, launched, and compared with the reference evaluator on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from fusion.codegen.triton import Config, TritonTarget
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.making import assert_same, expected, tensors


def build(kernel: Kernel, config: Config | None = None) -> Callable[..., None]:
    target = TritonTarget()
    return target.build(kernel, target.emit(kernel, config))


def check(kernel: Kernel, config: Config | None = None, *, factor: float = 4.0) -> None:
    """Launch, and compare with the reference evaluator on the CPU."""
    given = tensors(kernel)
    want = expected(kernel, given)
    got = [tensor.cuda() for tensor in given]
    build(kernel, config)(*got)
    assert_same(kernel, [tensor.cpu() for tensor in got], want, factor)
