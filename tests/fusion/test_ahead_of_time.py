"""The Triton kernels of real architectures, forward and backward, compile for sm_90 on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fusion.codegen.targets import TARGETS
from fusion.compilation.autograd import aot_backend
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.ir.kernel import Kernel
from fusion.runtime import Boxed
from fusion.schedule.kernels import KernelCall
from tests.fusion.architectures import ARCHITECTURES, build
from tests.fusion.capabilities import of_everything


def kernels_of(name: str) -> dict[Kernel, None]:
    """Every distinct kernel that a training step would launch on sm_90."""
    target = TARGETS["triton"]("sm_90")
    result: dict[Kernel, None] = {}

    def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
        _, schedule = schedule_graph(graph, target, Trace(None, label))
        result.update(dict.fromkeys(step.kernel for step in schedule.steps if isinstance(step, KernelCall)))

        def run(args: list[object]) -> tuple[object, ...]:
            inputs = tuple(args)
            args.clear()
            return graph(*inputs)

        return run

    model, inputs = build(name)
    torch.compile(model, backend=aot_backend(compile_one, of_everything))(**inputs)[0].sum().backward()
    return result


QUICK = ("bert", "convnext", "gpt2", "vit")
"""One of each kind, compiled by default."""
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(ARCHITECTURES)]


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_to_machine_code(name: str) -> None:
    target = TARGETS["triton"]("sm_90")
    result = kernels_of(name)
    assert len(result) >= 8
    for kernel in result:
        stages = dict(target.stages(kernel, target.emit(kernel)))
        assert ".target sm_90" in stages["ptx"] and stages["cubin"][:4] == b"\x7fELF"
