"""Minimises a failing program: each step must still fail in the same way."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.random_programs.builder import names_read
from tests.random_programs.grammar import runs
from tests.random_programs.inputs import Input
from tests.random_programs.program import Program


def smallest(program: Program, fails: Callable[[Program], bool], tries: int = 200) -> Program:
    """Return the last program of a descent on which `fails` still holds."""
    result = True
    while result and tries > 0:
        result = False
        for candidate in smaller(program):
            tries -= 1
            if tries < 0:
                break
            if runs(candidate) and fails(candidate):
                program, result = candidate, True
                break
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs that have a little less than this one, largest steps first."""
    *lines, last = program.lines
    results = last.removeprefix("return (").removesuffix(",)").split(", ")
    if any(program.options):
        yield from (replace(program, options=(each,)) for each in program.options)
    if len(program.calls) > 1:
        yield replace(program, calls=program.calls[:1])
        yield replace(program, calls=program.calls[1:])
    if program.dynamic is not None:
        yield replace(program, dynamic=None)
    if program.backward:
        inputs = tuple(replace(entry, grad=False) for entry in program.inputs)
        yield replace(program, backward=False, inputs=inputs)
    if len(results) > 1:
        for result in results:
            yield _pruned(program, lines, [result])
        for result in results:
            yield _pruned(program, lines, [other for other in results if other != result])
    for position in reversed(range(len(lines))):  # return the operands of a statement instead of its result
        for name in dict.fromkeys(names_read(lines[position])):
            if name not in ("torch", "F") and len(name) < 4:
                built = _targets(lines[position])
                kept = [result for result in results if result not in built]
                yield _pruned(program, lines[:position] + lines[position + 1 :], [*kept, name])
    for position in range(len(lines)):
        yield _pruned(program, lines[:position] + lines[position + 1 :], results)
    yield from _given(program, lines, results)
    yield from _plainer(program)


def _pruned(program: Program, lines: list[str], results: list[str]) -> Program:
    """Without the statements and inputs that no result needs."""
    needed, kept = set(results), list[str]()
    for line in reversed(lines):
        if not _targets(line) or needed & set(_targets(line)):
            needed |= set(names_read(line))
            kept.insert(0, line)
    inputs = tuple(entry for entry in program.inputs if entry.name in needed)
    source = "\n".join([*kept, f"return ({', '.join(dict.fromkeys(results))},)"])
    integers = tuple(name for name in program.integers if name in needed)
    return replace(program, inputs=inputs, source=source, integers=integers)


def _given(program: Program, lines: list[str], results: list[str]) -> Iterator[Program]:
    """Yield programs in which the result of a statement is an input."""
    if len(program.calls) > 1:
        return
    names = {size: name for name, size in program.calls[0].items() if size > 1}
    for position in reversed(range(len(lines))):
        for target in _targets(lines[position]):
            probe = _pruned(program, lines[: position + 1], [target])
            try:
                value = probe.function()(*probe.arguments(0))[0]
            except Exception:
                continue
            fresh = f"y{len(program.inputs)}"
            dims = tuple(names.get(size, size) for size in value.shape)
            entry = Input(fresh, dims, value.dtype, grad=program.backward and value.is_floating_point())
            rest = [_renamed(line, target, fresh) for line in lines[position + 1 :]]
            outs = [fresh if result == target else result for result in results]
            yield _pruned(replace(program, inputs=(*program.inputs, entry)), lines[:position] + rest, outs)


def _plainer(program: Program) -> Iterator[Program]:
    for position, entry in enumerate(program.inputs):
        for change in ({"layout": "contiguous"}, {"values": "normal"}, {"grad": False}):
            if any(getattr(entry, key) != value for key, value in change.items()):
                changed = replace(entry, **change)
                yield replace(program, inputs=(*program.inputs[:position], changed, *program.inputs[position + 1 :]))
    for name in program.calls[0]:
        for size in (1, 2, 3, 4, 8):
            if size < program.calls[0][name]:
                yield replace(program, calls=({**program.calls[0], name: size}, *program.calls[1:]))
                break


def _targets(line: str) -> list[str]:
    statement = ast.parse(line).body[0]
    if isinstance(statement, ast.With):
        statement = statement.body[0]
    if not isinstance(statement, ast.Assign):
        return []
    return [
        node.id
        for node in ast.walk(statement.targets[0])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def _renamed(line: str, old: str, new: str) -> str:
    tree = ast.parse(line)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = new
    return ast.unparse(tree)
