"""Launches that are prepared while the one before is running wait for its end before they touch memory."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion

pytestmark = pytest.mark.usefixtures("without_disassembly")

MEMORY = re.compile(r"\b(ld|st|atom|red)\.(global|acquire|relaxed|async)|cp\.async|cp\.reduce|mbarrier\.try_wait")


def empty(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


PROGRAMS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "map": (F.gelu, (empty(512, 1024),)),
    "rows": (lambda x: F.layer_norm(x, (768,)), (empty(512, 768),)),
    "last block": (torch.sum, (empty(1 << 22),)),
    "several": (lambda x, y: (x.sum(0), y.amax(0)), (empty(8192, 768), empty(4096, 512))),
    "scan": (lambda x: x.cumsum(-1), (empty(64, 1000),)),
    "product": (lambda x, w: F.gelu(x @ w), (empty(4096, 1024), empty(1024, 4096))),
    "products side by side": (
        lambda x, v, w: (x @ v, x @ w),
        (empty(4096, 1024), empty(1024, 2048), empty(1024, 512)),
    ),
    "vector": (lambda x, w: x @ w.bfloat16(), (empty(1, 4096), empty(4096, 4096).to(torch.int8))),
    "attention": (attention, tuple(empty(2, 16, 2048, 128) for _ in range(3))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_wait_before_they_touch_memory(name: str) -> None:
    program, inputs = PROGRAMS[name]
    kernels = fusion.export_kernels(program, *inputs, target="triton", arch="sm_90").kernels
    assert kernels
    for kernel in kernels:
        assert '"launch_pdl": True' in kernel.source
        ptx = str(kernel.artefacts["ptx"])
        waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx)]
        first = MEMORY.search(ptx)
        assert len(waits) == 1 and first is not None and waits[0] < first.start(), kernel.source
        assert ".entry" in ptx[: waits[0]], "a function that is called waits, but not the one that is launched"


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_other_architectures_know_no_dependent_launches(arch: str) -> None:
    (kernel,) = fusion.export_kernels(F.gelu, empty(512, 1024), target="triton", arch=arch).kernels
    assert "gdc_wait" not in kernel.source and "launch_pdl" not in kernel.source
