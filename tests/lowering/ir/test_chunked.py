"""Chunked regions have the meaning of their nodes; malformed ones are refused by the verifier."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch

from fusion.codegen.c.target import CTarget
from fusion.lowering.errors import VerifyError
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.chunks import BETA, START, Chunked
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.program import Axis, BufferRef, Map, Program
from fusion.lowering.printer import format_program
from fusion.lowering.verify import verify_program
from fusion.schedule.chunks import chunk_products
from fusion.schedule.library.copies import merge_copies
from fusion.schedule.rewrites.inline import inline_cheap_maps
from tests.lowering.lowered import lowered

X, W = torch.randn(70, 260), torch.randn(1003, 260) / 16


def parts(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A row each, a sum over rows by a product, and a fold of all rows."""
    shares = torch.softmax(x @ w.t(), -1)
    return shares.amax(-1), shares.t() @ x, (shares * shares).sum()


def chunked() -> tuple[Program, Program, Chunked[Program]]:
    """The program without chunks, the one with them, and the node in it."""
    whole = inline_cheap_maps(lowered(parts, X, W))
    changed = chunk_products(whole, CTarget().capabilities, workspace=4 * 1003 * 32)
    (node,) = (node for node in changed.nodes if isinstance(node, Chunked))
    return whole, changed, node


def with_node(changed: Program, node: Chunked[Program]) -> Program:
    return changed.edited(node if isinstance(each, Chunked) else each for each in changed.nodes)


@pytest.mark.parametrize("exact", [True, False], ids=["as stated", "float64"])
def test_a_region_in_chunks_keeps_its_meaning(exact: bool) -> None:
    whole, changed, node = chunked()
    assert len(node.rows) == len(node.sums) == len(node.folds) == 1
    assert [points for _, points, _ in node.starts(70)] == [32, 32, 6]
    verify_program(changed)
    x, w = (X, W) if exact else (X.double(), W.double())
    before, after = (run_program(form, [X, W], exact=exact) for form in (whole, changed))
    for old, new, eager in zip(before, after, parts(x, w), strict=True):
        assert isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
        tolerance = {} if exact else {"rtol": 1e-12, "atol": 1e-14}
        torch.testing.assert_close(new, old, **tolerance)
        torch.testing.assert_close(new, eager, **tolerance)


def test_it_is_printed_in_one_line() -> None:
    _, changed, node = chunked()
    (line,) = (line for line in format_program(changed).splitlines() if "in_chunks" in line)
    assert "70 points of " in line and "cut along 0" in line and node.reason in line


def test_copies_that_a_chunked_node_reads_are_merged() -> None:
    _, changed, node = chunked()
    shape = changed.buffers["arg0_1"].shape
    axes = tuple(Axis(axis_symbol(k), size) for k, size in enumerate(shape))
    source = Load("arg0_1", tuple(axis.symbol for axis in axes), torch.float32)
    copies = [Map(name, axes, source) for name in ("one", "two")]
    other = replace(node, sliced=tuple(("two" if name == "arg0_1" else name, cut) for name, cut in node.sliced))
    buffers = [replace(changed.buffers["arg0_1"], name=name) for name in ("one", "two")]
    nodes = [*copies, *(other if each is node else each for each in changed.nodes)]
    merged = merge_copies(changed.edited(nodes, buffers=buffers), {"one", "two"})
    (result,) = (each for each in merged.nodes if isinstance(each, Chunked))
    assert result.reads == tuple("one" if name == "two" else name for name in other.reads)
    verify_program(merged)
    torch.testing.assert_close(run_program(merged, [X, W]), run_program(changed, [X, W]))


def refused(change: dict[str, object], rule: str) -> None:
    _, changed, node = chunked()
    with pytest.raises(VerifyError, match=rule):
        verify_program(with_node(changed, replace(node, **change)))  # type: ignore[arg-type]  # fields by name


def test_defects_are_refused() -> None:
    _, changed, node = chunked()
    (body, *_) = node.bodies
    (row,) = node.rows
    (folded,) = node.folds
    refused({"bodies": ()}, "0 bodies are neither one nor one and a shorter one")
    refused({"folds": {folded: "prod"}}, "nothing joins the")
    refused({"rows": {row: 3}}, "is cut along dimension 3, which it does not have")
    refused({"sliced": (("nowhere", None), *node.sliced[1:])}, "nowhere is read before it is written")
    refused({"length": sympy.Symbol("s9")}, "the size s9 is unknown")
    refused({"symbols": (sympy.Symbol("s9"),)}, "the size s9 is unknown")
    refused({"bodies": (replace(body, inputs=(BETA, START, *body.inputs[2:])),)}, "a body takes the sizes")
    refused({"bodies": (replace(body, outputs=body.outputs[:1]),)}, "a body gives")
    refused({"bodies": (replace(body, inputs=body.inputs[:-1]),)}, "a body takes")
    twice = changed.edited([*changed.nodes, node])
    with pytest.raises(VerifyError, match="is written twice"):
        verify_program(twice)
    assert BufferRef(row) in changed.outputs
