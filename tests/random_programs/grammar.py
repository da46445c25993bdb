"""Random programs: the choice of the next statement, and statements whose operands have to be adapted.

`generate(rng, seed)` always gives a program that eager can run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.random_programs import integers, models, pieces, sharing, templates
from tests.random_programs.builder import LARGEST, WHOLE, Builder, is_any, is_float, names_read
from tests.random_programs.crash_guards import Survived
from tests.random_programs.inputs import Input
from tests.random_programs.program import Program
from tests.random_programs.runs import Call
from tests.random_programs.templates import filled

Production = Callable[[Builder], bool]

SMALL = (0, 1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 7, 8, 8, 9, 12, 13, 16, 17, 20, 31, 32, 33, 40, 65)
LONG = (100, 129, 257, 300, 515, 1024, 1500, 2049, 4096)


def table(entries: Sequence[str]) -> Production:
    """An entry of a table as the next statement."""

    def production(builder: Builder) -> bool:
        expression = filled(builder, builder.one(entries))
        return expression is not None and builder.add(expression)

    return production


def mutate(builder: Builder) -> bool:
    """Add a statement that writes to a tensor without elements that share memory."""
    statement = filled(builder, builder.one(templates.MUTATIONS))
    if statement is None:
        return False
    subject = statement.partition(".")[0].partition("[")[0]
    if overlaps(builder.values[subject]):
        return False
    return builder.attempt(statement, [])


def overlaps(tensor: Tensor) -> bool:
    """May two elements share memory?"""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent = stride * (size - 1) + extent
    return False


def chained(builder: Builder) -> bool:
    """Write to a view of a view of a temporary, and read another view of it."""
    name = builder.operand(lambda value: value.dim() > 0 and value.numel() > 1)
    if name is None or not builder.add(f"{name} * 1"):
        return False
    whole = view = f"t{builder.count - 1}"
    for _ in range(builder.one((1, 2, 2, 3))):
        way = builder.one(CHAINED)
        if builder.add(way.format(x=view, d=builder.dim(view), e=builder.dim(view))):
            view = f"t{builder.count - 1}"
    if overlaps(builder.values[view]):
        return False
    act = builder.one(("mul_(3)", "add_(2)", "zero_()", f"copy_({builder.matching(view, is_any)})"))
    return builder.attempt(f"{view}.{act}", []) and builder.add(f"{whole}.transpose(0, -1) + 1")


CHAINED = (
    *("{x}[1:]", "{x}[..., ::2]", "{x}.transpose({d}, {e})", "{x}.select({d}, -1)", "{x}.view(-1)", "{x}.mT") * 2,
    *("{x}.narrow({d}, 0, 1)", "{x}.unsqueeze({d})", "{x}.diagonal()", "{x}.flatten()", "{x}.unflatten({d}, (-1, 2))"),
    *("{x}.squeeze()", "{x}.reshape({x}.shape[0], -1)", "{x}.chunk(2, {d})[-1]", "{x}.movedim({d}, {e})", "{x}[None]"),
    *("{x}.unfold({d}, 2, 2)", "{x}.view_as({x})", "{x}[..., -1]"),
)


def windows(builder: Builder) -> bool:
    """Write to two overlapping views of a temporary, and read it."""
    name = builder.operand(lambda value: value.dim() > 0 and value.shape[0] > 2 and value.dtype is not torch.bool)
    if name is None or not builder.add(f"{name} * 1"):
        return False
    whole = f"t{builder.count - 1}"
    ways = builder.one((("[1:]", "[:-1]"), ("[::2]", "[1:]"), ("[:2]", ".flip(0)"), (".transpose(0, -1)", "[0]")))
    acts = zip(ways, ("mul_(3)", "add_(2)"), strict=True)
    return all(builder.attempt(f"{whole}{way}.{act}", []) for way, act in acts)


def product(builder: Builder) -> bool:
    """A matrix product, of any ranks."""
    name = builder.operand(lambda value: is_float(value) and value.dim() > 0 and value.shape[-1] > 0)
    if name is None:
        return False
    left = builder.values[name]
    deep, dtype = left.shape[-1], left.dtype
    width = builder.one([*[size for size in builder.sizes.values() if size > 0], 1, 3, 4])
    form = builder.one(("mm", "mm", "linear", "linear", "bmm", "mv", "outer", "einsum", "transposed", "addmm", "self"))

    if form == "mm":
        other = builder.shaped((deep, width), dtype)
        return builder.add(f"{name} @ {other}")
    if form == "linear":
        weight = builder.shaped((width, deep), dtype)
        bias = f", {builder.shaped((width,), dtype)}" if builder.chance(0.5) else ""
        return builder.add(f"F.linear({name}, {weight}{bias})")
    if form == "bmm" and left.dim() > 2:
        other = builder.shaped((*left.shape[:-2], deep, width), dtype)
        return builder.add(f"{name} @ {other}")
    if form == "transposed" and left.dim() > 1:
        other = builder.shaped((*left.shape[:-2], width, deep), dtype)
        return builder.add(f"{name} @ {other}.mT * 0.5")
    if form == "addmm" and left.dim() == 2:
        bias = builder.shaped((left.shape[0], width), dtype)
        other = builder.shaped((deep, width), dtype)
        return builder.add(f"torch.addmm({bias}, {name}, {other}, beta=0.5, alpha=2)")
    if form == "self" and left.dim() > 1:
        return builder.add(f"{name} @ {name}.mT")
    if form == "einsum" and left.dim() == 2:
        other = builder.shaped((left.shape[1], width), dtype)
        return builder.add(f"torch.einsum('ab,bc->ca', {name}, {other})")
    if form == "outer" and left.dim() == 1:
        return builder.add(f"torch.outer({name}, {builder.shaped((width,), dtype)})")
    return builder.add(f"{name} @ {builder.shaped((deep,), dtype)}")


def attend(builder: Builder) -> bool:
    """Attention by hand: two products with a softmax between them."""
    name = builder.operand(lambda value: is_float(value) and value.dim() > 1 and 0 not in value.shape)
    if name is None:
        return False
    query = builder.values[name]

    length = builder.one([size for size in builder.sizes.values() if size > 0] or [3])
    key, value = (builder.shaped((*query.shape[:-2], length, query.shape[-1]), query.dtype) for _ in range(2))
    scores = f"({name} @ {key}.mT) * 0.5"
    if builder.chance(0.3):
        scores = f"({scores}).masked_fill(torch.ones_like({scores}, dtype=torch.bool).triu(1), float('-inf'))"
    return builder.add(f"torch.softmax({scores}, -1) @ {value}")


def control(builder: Builder) -> bool:
    """Python's own control flow, by sizes and numbers."""
    name = builder.operand(is_float)
    if name is None:
        return False
    form = builder.one(
        (
            "{x} if {x}.dim() > 1 else {x} * 2",
            "sum({x} * k for k in range(3))",
            "torch.stack([{x} + k for k in range({x}.dim() + 1)])",
            "{x} * {x}.shape[-1]",
            "{x} / {x}.numel()",
            "{x} + (1 if {x}.shape[0] > 4 else 2)",
            "[{x} * 2, {x} + 1][{x}.dim() % 2]",
        )
    )
    return builder.add(form.replace("{x}", name))


def autocast(builder: Builder) -> bool:
    """A statement under autocast."""
    expression = filled(builder, builder.one(models.MIXED))
    if expression is None:
        return False
    dtype = builder.one(("torch.bfloat16", "torch.bfloat16", "torch.float16"))
    result = f"t{builder.count}"
    device = next(iter(builder.values))
    return builder.attempt(f"with torch.autocast({device}.device.type, {dtype}): {result} = {expression}", [result])


SEVERAL = (
    "chunk({x}, 2, {d})",
    "split({x}, [1, {x}.shape[{d}] - 1], {d})",
    "tensor_split({x}, 2, {d})",
    "max({x}, {d})",
    "unbind({x}[:2])",
    "aminmax({x})",
    "var_mean({x}, {d}, correction=0)",
)


def several(builder: Builder) -> bool:
    """One call with several results."""
    name = builder.operand(lambda value: is_any(value) and value.dim() > 0)
    if name is None:
        return False
    result = builder.count
    dim = builder.dim(name)
    call = builder.one(SEVERAL).format(x=name, d=dim)
    return builder.attempt(f"t{result}, t{result + 1} = torch.{call}", [f"t{result}", f"t{result + 1}"])


PRODUCTIONS: tuple[tuple[Production, int], ...] = (
    (table(templates.ARITHMETIC), 20),
    (table(templates.FUNCTIONS), 12),
    (table(templates.CHOICES), 9),
    (table(templates.REDUCTIONS), 14),
    (table(templates.NORMS), 9),
    (table(templates.VIEWS), 18),
    (table(templates.ASSEMBLIES), 8),
    (table(templates.GATHERS), 6),
    (table(templates.SCANS), 4),
    (table(pieces.NUMBERS), 12),
    (table(pieces.LAYERS), 6),
    (table(pieces.ATTENTION), 4),
    (table(pieces.LOSSES), 3),
    (table(pieces.IMAGES), 5),
    (table(pieces.ORDERS), 5),
    (table(integers.INTEGERS), 3),
    (table(models.CACHES), 3),
    (table(models.EXPERTS), 4),
    (table(models.PLACES), 3),
    (table(models.MASKS), 4),
    (table(models.PARTS), 5),
    (table(models.FORMATS), 4),
    (autocast, 2),
    (product, 7),
    (attend, 1),
    (mutate, 8),
    (windows, 1),
    (chained, 4),
    (control, 2),
    (several, 2),
    *((production, 3) for production in sharing.SHARING),
)


def generate(rng: random.Random, seed: int, largest: int = LARGEST) -> Program:
    """Return a program that eager can run in all of its calls; tensors of the first have at most `largest` elements."""
    long = rng.random() < 0.15
    sizes = drawn(rng, long)
    grads = rng.random() < 0.4
    builder = Builder(rng, sizes, seed, grads=grads, odd=rng.random() < 0.12, largest=largest)
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        rank = rng.choice((1, 2, 2)) if long else rng.choice((0, 1, 2, 2, 2, 3, 3, 4))
        names: list[int | str] = [*sizes, *sizes, 1]
        shape = [rng.choice(names) for _ in range(rank)]
        builder.input(shape, is_float if rng.random() < 0.8 else is_any)
    wanted, weights = rng.choice((2, 3, 4, 5, 6, 8, 10, 14)), [weight for _, weight in PRODUCTIONS]
    for _ in range(3 * wanted):
        if len(builder.statements) < wanted:
            rng.choices(PRODUCTIONS, weights)[0][0](builder)
    program = finished(builder)
    return program if runs(program) else generate(rng, seed, largest)  # sizes may hang on numbers, which are others now


def drawn(rng: random.Random, long: bool) -> dict[str, int]:
    """A size for each name, most of them different."""
    sizes = {name: rng.choice(SMALL) for name in "ABC"}
    if long:
        sizes = {"A": rng.choice(LONG), "B": rng.choice((1, 2, 3, 5))}
    return sizes


def finished(builder: Builder) -> Program:
    """Return the built program, with as many calls and gradients as eager supports."""
    rng = builder.rng
    used = builder.results()
    lines = [*builder.statements, f"return ({', '.join(used)},)"]
    read = {name for line in lines for name in names_read(line)}
    inputs = tuple(entry for entry in builder.inputs if entry.name in read)
    passed = {name: value for name, value in builder.integers.items() if name in read}
    first = {**builder.sizes, **passed}
    program = Program(inputs, "\n".join(lines), (first,), seed=builder.seed, integers=tuple(passed))
    if rng.random() < 0.35 or passed:
        others = {name: max(2, size + rng.choice((-3, -1, 1, 2, 5))) for name, size in builder.sizes.items()}
        others |= {name: rng.choice(WHOLE) for name in passed}
        calls = rng.choice(((first, others), (first, others), (first, first, others), (first, others, first, others)))
        again = replace(program, calls=calls, dynamic=rng.choice((None, True)))
        if runs(again):
            program = again
    if rng.random() < 0.15:  # compiled twice; then the first options again
        options = ({}, rng.choice(({"numerics": "strict"}, {"workspace": 1 << 12}, {"close_calls": False})))
        program = replace(program, options=options, calls=(program.calls * 3)[:4])
    trained = replace(program, backward=True)
    if len(program.calls) > 1:  # PyTorch's capture itself spreads the gradient of an expanded leaf (docs/limits.md)
        trained = replace(trained, inputs=tuple(map(_without_expanded_leaf, program.inputs)))
    return trained if builder.grads and runs(trained) else without_gradients(program)


def _without_expanded_leaf(entry: Input) -> Input:
    return replace(entry, grad=entry.grad and entry.layout != "expanded")


def without_gradients(program: Program) -> Program:
    """The same program on inputs that need none."""
    return replace(program, inputs=tuple(replace(entry, grad=False) for entry in program.inputs))


def runs(program: Program) -> bool:
    """Does eager run every call, and its backward if requested?"""
    try:
        with Survived():
            for number in range(len(program.calls)):
                Call(program, number).run()
    except Exception:
        return False
    return True
