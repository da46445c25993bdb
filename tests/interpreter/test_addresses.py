"""An access beyond a tensor is detected, even into valid memory; every test here relies on it."""

from __future__ import annotations

import pytest
from triton.runtime.interpreter import InterpreterError

from fusion.codegen.triton import TritonTarget
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.making import tensors
from tests.codegen.kernels.pointwise import add
from tests.codegen.kernels.rows import scattered

TARGET = TritonTarget()


@pytest.mark.parametrize(
    ("kernel", "short", "said"),
    [
        (add(7), 0, "reads bytes 0 to 28 of a tensor of 4 bytes"),
        (add(7), 2, "writes bytes 0 to 28 of a tensor of 4 bytes"),
        (scattered("sum", 9, 3, 5), 2, "updates bytes 0 to 40 of a tensor of 4 bytes"),
    ],
)
def test_an_access_beyond_a_tensor_is_noticed(kernel: Kernel, short: int, said: str) -> None:
    given = tensors(kernel)
    launch = TARGET.build(kernel, TARGET.emit(kernel))
    launch(*given)
    given[short] = given[short].flatten()[:1]
    with pytest.raises(InterpreterError, match=said):
        launch(*given)
