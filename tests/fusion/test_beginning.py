"""When an accelerator's target begins what it needs once in a process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch, fusion, fusion.beginning
from torch import fx

order = []

def prepare(device_type):
    order.append(device_type)
    raise RuntimeError("no such device")

def backend(graph: fx.GraphModule, inputs: list[object]):
    order.append("traced")
    return graph.forward

torch.cuda.is_initialized = lambda: {initialized}
fusion.beginning.prepare = prepare
assert torch.compile(torch.exp, backend=backend)(torch.zeros(2)).sum() == 2
assert order == {order}, order
"""


def run(**how: object) -> None:
    """In a process whose Dynamo nobody has reset, which forgets whom to tell."""
    subprocess.run([sys.executable, "-c", PROGRAM.format(**how)], check=True)


def test_it_begins_with_dynamo_where_an_accelerator_is_in_use() -> None:
    """What fails then is no reason for Dynamo to fail."""
    run(initialized=True, order=["cuda", "traced"])


def test_it_does_not_begin_where_none_is() -> None:
    run(initialized=False, order=["traced"])
