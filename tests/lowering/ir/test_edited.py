"""Rewriting programs: unchanged fields are kept, and rewrites without effect return the same object."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion.lowering.errors import Origin
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.program import BufferRef, Contract, Extern, Map, Program
from fusion.lowering.verify import verify_program
from tests.lowering.building import F32, I0, I1, R0, axis, buffer, program

AXES = (axis(I0, 5),)
HALF = torch.full((5,), 0.5)


def chain() -> Program:
    """z = exp(x · half) + 1, in two nodes; half is a constant."""
    scaled = op("mul", Load("x", (I0,), F32), Load("half", (I0,), F32))
    example = program(
        [buffer(name, (5,)) for name in ("x", "half", "y", "z")],
        [Map("y", AXES, op("exp", scaled)), Map("z", AXES, op("add", Load("y", (I0,), F32), Load("y", (I0,), F32)))],
        ["x"],
        "z",
    )
    origins = {"y": Origin("exp"), "z": Origin("add")}
    return replace(example, constants={"half": HALF}, origins=origins, inlined={"y": ("mul",)})


def run(example: Program) -> torch.Tensor:
    verify_program(example)
    (result,) = run_program(example, [torch.arange(5.0)])
    assert isinstance(result, torch.Tensor)
    return result


def test_fields_that_are_not_passed_are_kept() -> None:
    example = chain()
    copy = Map("w", AXES, Load("y", (I0,), F32))
    last = Map("z", AXES, op("add", Load("w", (I0,), F32), Load("y", (I0,), F32)))
    changed = example.edited(
        [example.nodes[0], copy, last],
        buffers=[replace(example.buffers["y"], name="w")],
        origins={"w": "y"},
        inlined={"w": example.operations_of("y")},
    )
    assert list(changed.buffers) == ["x", "half", "y", "z", "w"] and changed.constants is example.constants
    assert changed.origins == {**example.origins, "w": example.origins["y"]}
    assert changed.operations_of("w") == ("mul", "y", "w") and changed.operations_of("y") == ("mul", "y")
    assert (changed.inputs, changed.outputs) == (example.inputs, example.outputs)
    torch.testing.assert_close(run(changed), run(example))


def test_outputs_are_replaced() -> None:
    example = chain()
    changed = example.edited(outputs=[BufferRef("y")])
    torch.testing.assert_close(run(changed), torch.exp(torch.arange(5.0) / 2))


def test_nothing_changed_is_the_same_object() -> None:
    example = chain()
    assert example.edited() is example
    assert example.edited(list(example.nodes), buffers=example.buffers.values(), outputs=example.outputs) is example
    assert example.edited(origins={"y": "y"}, inlined=example.inlined) is example
    assert example.edited([replace(node) for node in example.nodes]) is not example  # nodes of their own are meant


def test_an_origin_that_is_not_known_is_a_defect() -> None:
    with pytest.raises(KeyError, match="missing"):
        chain().edited(origins={"w": "missing"})


def product() -> Program:
    """z = x · x of 3 by 3, with its library call."""
    calls = (Extern(("z",), torch.ops.aten.mm.default, (BufferRef("x"), BufferRef("x"))),)
    lhs, rhs = Load("x", (I0, R0), F32), Load("x", (R0, I1), F32)
    node = Contract("z", (axis(I0, 3), axis(I1, 3)), (axis(R0, 3),), lhs, rhs, (I0,), (I1,), F32)
    example = program([buffer("x", (3, 3)), buffer("z", (3, 3))], [node], ["x"], "z")
    return example.edited(library={"z": calls})


def test_equal_contracts_keep_their_library_calls() -> None:
    result = product()
    verify_program(result)
    (node,) = result.nodes
    assert isinstance(node, Contract) and replace(node) == node and hash(replace(node)) == hash(node)
    assert result.edited([replace(node)]).library == result.library
    (called,) = result.library.values()
    x = torch.randn(3, 3)
    for form in (result, result.edited(called)):
        verify_program(form)
        torch.testing.assert_close(run_program(form, [x])[0], x @ x)


def test_the_librarys_calls_go_with_their_contract() -> None:
    result = product()
    (called,) = result.library.values()
    assert result.edited(called).library == {}
    assert result.edited(library={"z": ()}).library == {}
    assert result.edited(library={"x": called}).library == result.library
