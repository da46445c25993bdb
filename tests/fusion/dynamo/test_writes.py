"""Writes in graphs of Dynamo and of exported programs, and masks of attention that are written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor, fx, nn
from torch.export import export

import fusion
from fusion.dynamo.writes import changes_first, written_memories


class Module(nn.Module):
    """A function as a module, which can be exported."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def all_at_once(mask: Tensor) -> Tensor:
    return mask.fill_diagonal_(1)


def through_a_view(mask: Tensor) -> Tensor:
    mask.view(-1)[::2].sub_(5)
    return mask


def by_index(mask: Tensor) -> Tensor:
    mask[0].fill_(-5)
    mask[:, 3] = -7
    return mask


def into_out(mask: Tensor) -> Tensor:
    return torch.sub(mask, torch.eye(12) * 9, out=mask)


def together(mask: Tensor) -> Tensor:
    torch._foreach_sub_([mask[0], mask[1]], 4.0)
    return mask


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("written", [all_at_once, through_a_view, by_index, into_out, together])
def test_a_mask_that_is_written_to_is_not_taken_for_what_it_was(
    written: Callable[[Tensor], Tensor], exported: bool
) -> None:
    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=written(torch.zeros(12, 12)))

    x = torch.randn(2, 12, 12)
    program = export(Module(attention), (x,)) if exported else attention
    with torch.no_grad():
        result = fusion.fuse(program, options={"strict": True})(x)  # type: ignore[operator]  # an exported program, too
    torch.testing.assert_close(result, attention(x))


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        (torch.ops.aten.add_.Tensor, True),
        (torch.ops.aten.fill_diagonal_.default, True),
        (torch.ops.aten._foreach_add_.Scalar, True),
        (torch.ops.aten.add_, True),
        (torch.ops.aten.add.Tensor, False),
        (torch.ops.aten.__or__.Tensor, False),
        (torch.ops.aten.copy_.default, True),
        (torch.Tensor.mul_, True),
        (torch.mul, False),
    ],
)
def test_operations_say_whether_they_write(target: Callable[..., object], changes: bool) -> None:
    graph = fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"), 1))
    assert changes_first(node) is changes


def test_memory_that_is_written_through_views_is_found() -> None:
    seen: list[tuple[int, int]] = []

    def program(x: Tensor, y: Tensor) -> Tensor:
        x[1:].add_(1)
        return x + y

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> object:
        written = written_memories(graph.graph)
        nodes = graph.graph.find_nodes(op="placeholder")
        found = [node.meta["example_value"].untyped_storage()._cdata in written for node in nodes]
        seen.append((sum(found), len(written)))
        return graph

    torch.compile(program, backend=backend)(torch.ones(3), torch.ones(3))  # type: ignore[arg-type]  # its type is looser
    assert seen == [(1, 1)]
