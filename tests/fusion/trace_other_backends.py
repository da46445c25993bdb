"""Prints the traces of another backend: PyTorch's tables, and the graphs that it captures.

`python -m tests.fusion.trace_other_backends [step …]` runs the steps, then prints the graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import callback, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.variables.builder import VariableBuilder
from torch._subclasses import FakeTensorMode, fake_impls
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import transformer

X = torch.linspace(-1, 1, 48).view(2, 3, 8)


class Masked(nn.Module):
    """PyTorch's transformer with a mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(torch.sin(x), mask=mask) + 1


def rested(x: Tensor) -> Tensor:
    y = F.dropout(x[:, ::2], 0.0)
    y += 1
    return y * y.stride(0)


def edged(x: Tensor, n: int) -> Tensor:
    return F.pad(x.t(), (n, 0)) * 2


def normed(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def programs() -> Iterator[tuple[Callable[..., Tensor], tuple[Any, ...], bool]]:
    """Programs that are traced otherwise for Fusion, their inputs, and whether sizes are dynamic."""
    torch.manual_seed(0)
    yield Masked(), (X, nn.Transformer.generate_square_subsequent_mask(3)), False
    yield rested, (X[0].clone(),), False
    yield normed, (X[..., :1],), False
    yield edged, (X[0], 0), True


def tables() -> list[object]:
    """Return the entries of PyTorch's tables that Fusion replaces while it traces."""
    operations = torch.ops.aten.dropout, torch.ops.aten.constant_pad_nd, torch.ops.aten.linalg_vector_norm
    function = transformer._detect_is_causal_mask
    return [
        *(dict(each.default.py_kernels) for each in operations),
        *(fake_impls.op_implementations_dict.get(each.default) for each in operations),
        *(torch._decomp.decomposition_table.get(each.default) for each in operations),
        *(id(function) in VariableBuilder._id_dispatch(), trace_rules.is_polyfilled_callable(function)),
        *(trace_rules.lookup(function), [*callback.callback_handler.start_callbacks]),
    ]


def traced() -> Iterator[str]:
    """Yield the graphs of another backend, their breaks, and traces without any backend."""
    graphs: list[str] = []

    def kept(graph: fx.GraphModule, inputs: object) -> fx.GraphModule:
        graphs.append(str(graph.graph))
        return graph

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=kept)(kept(graph, inputs), inputs)

    for program, given, dynamic in programs():
        explained = torch._dynamo.explain(program)(*given)
        yield f"{explained.graph_break_count} breaks: {[reason.reason for reason in explained.break_reasons]}"
        with torch.no_grad():
            torch.compile(program, backend=backend, dynamic=dynamic)(*given)
            yield f"{torch.compile(program, backend='aot_eager', dynamic=dynamic)(*given)}"
    yield from graphs
    for p in (0.0, 0.5):
        yield str(make_fx(torch.func.functionalize(partial(F.dropout, p=p)))(X).graph)
    thin = X[..., :1].clone()
    for sizes in (ShapeEnv(), None):
        with FakeTensorMode(shape_env=sizes) as mode, enable_python_dispatcher():
            fake = mode.from_tensor(thin)
            yield f"{F.pad(fake.permute(2, 1, 0), (0, -1)).stride()} {normed(fake).shape}"


def imported() -> None:
    """Import all of Fusion."""
    import fusion
    import fusion.api

    assert fusion.fuse is fusion.api.fuse


def compiled() -> None:
    """Compile with Fusion, which captures each program in one graph, with eager's results."""
    import fusion

    options: dict[str, Any] = {"strict": True, "graph_cache": False}
    for program, given, dynamic in programs():
        expected = program(*(each.clone() if isinstance(each, Tensor) else each for each in given))
        fused = fusion.fuse(program, options=options, dynamic=dynamic)
        for run in (fused, torch.compile(program, backend="fusion", options=options, dynamic=dynamic)):
            actual = run(*(each.clone() if isinstance(each, Tensor) else each for each in given))
            torch.testing.assert_close(actual, expected)
            assert actual.stride() == expected.stride()
        assert fusion.report(fused).kernels and not fusion.report(fused).graph_breaks
    fusion.export_kernels(rested, X[0])


def trace_once() -> None:
    """Trace with another backend."""
    assert list(traced())


def reset() -> None:
    """Reset Dynamo's state."""
    torch._dynamo.reset()


if __name__ == "__main__":
    before = tables()
    for step in map(
        {each.__name__: each for each in (imported, compiled, trace_once, reset)}.__getitem__, sys.argv[1:]
    ):
        step()
        assert step is reset or tables() == before, step.__name__
    print(*traced(), sep="\n")
