"""Runs a call through PyTorch's own capture, without the compiler.

Errors of the capture are errors of its compiled graphs, too.  A wrong result is excused if the capture returns the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.random_programs.comparing import Allowed, compared
from tests.random_programs.fake_layouts import Faked
from tests.random_programs.runs import Call, Run, run, unlike

DECOMPOSED = "aot_eager_decomp_partition"
"""PyTorch's capture with composite operations, and the gradients of norms, decomposed by PyTorch itself."""


def captured(call: Call, backend: str | Callable[..., object] = "aot_eager") -> Run | None:
    """Return the last call's run of PyTorch's own capture, after the earlier calls; None if it fails."""
    torch._dynamo.reset()
    function = torch.compile(call.program.function(), backend=backend, dynamic=call.program.dynamic)
    try:
        return [Call(call.program, number, call.device).run(function) for number in range(call.number + 1)][-1]
    except Exception:
        return None


class Captured:
    """The capture of one call, which runs at its first use."""

    def __init__(self, call: Call) -> None:
        self.call = call

    @cached_property
    def run(self) -> Run | None:
        """The run of the capture; None if it fails."""
        return captured(self.call)

    @cached_property
    def by_metadata(self) -> Run | None:
        """The run of the capture, whose results are laid out as its fake tensors say; None if it fails."""
        return captured(self.call, aot_autograd(fw_compiler=_laid_out))

    def formed_as(self, result: Run) -> str:
        """Return where else a run has the same form: in the capture, or by fake tensors alone; empty if in neither."""
        if self.run is not None and not unlike(result, self.run):
            return "in PyTorch's capture"
        return "PyTorch's fake tensors say" if any(not unlike(result, faked) for faked in self._faked()) else ""

    def as_wrong(self, name: str, ours: Tensor, theirs: Tensor, wrong: Tensor, allowed: Allowed) -> bool:
        """Is the capture wrong in each place where we are, and by the same?"""
        other = None if self.run is None else self.run.tensors.get(name)
        if other is None or other.shape != ours.shape or other.dtype is not ours.dtype:
            return False
        its, _ = compared(other, theirs, allowed)
        apart, _ = compared(ours, other, Allowed(usual=allowed.usual))
        return not (wrong & ~(its & ~apart)).any()

    def _faked(self) -> Iterator[Run]:
        """Yield the call as fake tensors trace it: operation by operation, and with symbols for all sizes.

        With symbols, a run with unknown sizes is omitted: asking for their number raises.
        """
        with suppress(RuntimeError), Faked():
            yield self.call.run()
        if self.by_metadata is not None:
            yield self.by_metadata
        with suppress(Exception):
            faked = _symbolic(self.call)
            tensors = [tensor for tensor in faked.tensors.values() if tensor is not None]
            assert all(int(n) >= 0 for tensor in tensors for n in (*tensor.shape, *tensor.stride()))
            yield faked


def _laid_out(graph: fx.GraphModule, example: Sequence[object]) -> Callable[..., list[object]]:
    """Run a traced graph by eager, and copy each result whose strides are known and differ from the fake tensor's."""
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in graph.graph.output_node().args[0]]

    def run_graph(*arguments: object) -> list[object]:
        results = list(graph(*arguments))
        for k, (result, value) in enumerate(zip(results, values, strict=True)):
            if not (isinstance(result, Tensor) and isinstance(value, Tensor)):
                continue
            if all(isinstance(n, int) for n in value.stride()) and _told_apart(result, value):
                layout = torch.empty_strided(result.shape, value.stride(), dtype=result.dtype, device=result.device)
                results[k] = layout.copy_(result)
        return results

    return run_graph


def _told_apart(result: Tensor, value: Tensor) -> bool:
    """Return whether strides differ by which elements are addressed; a copy would part views from their bases."""
    each = zip(result.shape, result.stride(), value.stride(), strict=True)
    return any(own != other for n, own, other in each if n > 1)


def _symbolic(call: Call) -> Run:
    """Trace the call with fake tensors of symbolic sizes, for which PyTorch derives strides in another way."""
    program, arguments = call.program, list[Tensor | int]()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    for k, tensor in enumerate(program.arguments(call.number, call.device)):
        if isinstance(tensor, int):
            arguments.append(tensor)
            continue
        symbols = StatelessSymbolicContext([DimDynamic.DUCK] * tensor.dim())
        arguments.append(mode.from_tensor(tensor, symbolic_context=symbols, source=ConstantSource(f"x{k}")))
    with mode:
        return run(program.function(), arguments, program.backward)
