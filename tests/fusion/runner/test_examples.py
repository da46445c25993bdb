"""Every pass of every stage has the name of its function, and an example in its docstring (`test_doctests.py`)."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator

import pytest

from fusion import stages
from fusion.attention import Chooser
from fusion.runner import adapters

TREE = ast.parse(inspect.getsource(stages))
OWN = {
    node.name: node
    for tree in (TREE, ast.parse(inspect.getsource(adapters)))
    for node in tree.body
    if isinstance(node, ast.FunctionDef)
}
"""The functions of the page of stages, and those that adapt passes to their subjects."""

OTHER_KIND = {
    "joint/specialise_head_widths": "adds guards on sizes, and leaves the graph as it is",
    "inference/specialise_head_widths": "adds guards on sizes, and leaves the graph as it is",
    "program/chain_products": "finds chains of nodes beside the Program",
    "clusters/grow_clusters": "makes clusters of a Program",
    "launches/make_kernels": "makes kernels of clusters",
}
"""Passes whose result is of another kind than what they are given, so that no lines can be compared."""

OF_CONTEXT: dict[str, Callable[..., object]] = {"choose_attention": Chooser}
"""Passes that a context provides: its attribute → the function that creates them."""


def entries() -> Iterator[tuple[str, ast.Call]]:
    """Return each pass of each stage, with the expression that creates it."""
    for node in TREE.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Call)
            and "Stage[" in ast.unparse(node.annotation)
        ):
            name, passes = node.value.args[:2]
            assert isinstance(passes, ast.Tuple)
            for each in passes.elts:
                assert isinstance(each, ast.Call)
                yield f"{ast.literal_eval(name)}/{ast.literal_eval(each.args[0])}", each


def functions(tree: ast.AST) -> Iterator[Callable[..., object]]:
    """The functions of other modules that an expression calls, also by way of functions of this page."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OF_CONTEXT:
            yield OF_CONTEXT[node.attr]
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "adapters":
            yield from functions(OWN[node.attr])
        elif isinstance(node, ast.Attribute) and inspect.ismodule(module := getattr(adapters, root(node), None)):
            yield getattr(module, node.attr)
        if not isinstance(node, ast.Name):
            continue
        if node.id in OWN:
            yield from functions(OWN[node.id])
        elif inspect.isfunction(result := getattr(stages, node.id, getattr(adapters, node.id, None))):
            yield result


def root(node: ast.Attribute) -> str:
    """The name whose attribute is read; empty for any other expression."""
    return node.value.id if isinstance(node.value, ast.Name) else ""


def test_all_passes_are_looked_at() -> None:
    known = {f"{stage.name}/{each.name}" for stage in stages.STAGES for each in stage.passes}
    assert {name for name, _ in entries()} == known


@pytest.mark.parametrize(("name", "entry"), [pytest.param(*each, id=each[0]) for each in entries()])
def test_a_pass_has_the_name_of_its_function(name: str, entry: ast.Call) -> None:
    """The function is that of another module which the pass calls, or the adapter itself if that does more."""
    called = {each.__name__ for each in functions(entry)}
    own = {node.attr for node in ast.walk(entry) if isinstance(node, ast.Attribute)} & {*OWN, *OF_CONTEXT}
    assert name.partition("/")[2] in called | own


@pytest.mark.parametrize(("name", "entry"), [pytest.param(*each, id=each[0]) for each in entries()])
def test_a_pass_has_an_example(name: str, entry: ast.Call) -> None:
    found = list(functions(entry))
    shown = [each for each in found if ">>> " in (each.__doc__ or "") and each.__module__ != "fusion.runner.passes"]
    assert shown, f"{name}: no example in the docstring of {', '.join(each.__qualname__ for each in found)}"
    compared = any("show_" in (each.__doc__ or "") for each in shown)
    assert compared != (name in OTHER_KIND), f"{name}: an example shows what is before the pass, and what after it"
