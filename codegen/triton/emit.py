"""Emit: a Kernel as the text of a Python file.

What enters is a Kernel; what leaves is a file that stands on its own: where its operations come from, the device
functions it needs, the `@triton.jit` kernel, its configuration, its grid, and a `launch` that anyone can call.  It is
imported and compiled as it is, so an edited file is an edited kernel.  Equal kernels give equal text (up to the
comments on their origin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from codegen.numerics import DEFAULT, Numerics
from codegen.triton import beside, joined, tail
from codegen.triton.ahead import Ahead
from codegen.triton.architecture import Units
from codegen.triton.arguments import argument
from codegen.triton.beside import Part
from codegen.triton.blocks import Config, block
from codegen.triton.body import Body
from codegen.triton.choices import candidates
from codegen.triton.expressions import prelude
from codegen.triton.expressions.indices import Layout, lay_out
from codegen.triton.expressions.limits import limit_of
from codegen.triton.expressions.matrices import Hosted
from codegen.triton.expressions.scopes import Names
from codegen.triton.expressions.values import Values
from codegen.triton.file import INDENT, Launch, blocks_of, file_of, passed, signature
from codegen.triton.products import turns
from codegen.triton.products.groups import GROUP, Given, in_gluon
from codegen.triton.rewrites.rounding import is_rounded, rounded_parts
from codegen.triton.rewrites.sigmoids import as_sigmoids
from codegen.triton.statements.unchanged import return_unchanged
from codegen.triton.tail import Follower
from lowering.kernel import Kernel


def emit(
    kernel: Kernel,
    config: Config | None = None,
    *,
    arch: str = "sm_90",
    numerics: Numerics = DEFAULT,
    wide: bool = False,
) -> str:
    """The source of `kernel` for `arch`, in `config` or in the default configuration.

    Of symbolic sizes it takes those with which all indices fit into 32 bits, as its function `fits` says of them; it
    takes any where `wide` is asked for, or where there is no such limit (`limits`).
    """
    units, strict = Units(arch, numerics.tf32), numerics.strict
    if kernel.sizes and not wide:
        limited = _emit(kernel, config, units, strict=strict, within_limit=True)
        if limited is not None:
            return limited
    text = _emit(kernel, config, units, strict=strict, within_limit=False)
    assert text is not None
    return text


def _emit(kernel: Kernel, config: Config | None, units: Units, *, strict: bool, within_limit: bool) -> str | None:
    """The source for sizes `within_limit`, if there is a limit, or for any."""
    if kernel.beside:
        products = joined.products_of(kernel.parts, units.arch)
        taken = products or kernel.parts
        parts = beside.parts_of(taken, kernel.name, units, joined=bool(products), within_limit=within_limit)
        limit = limit_of([part.layout for part in parts]) if within_limit else None
        if within_limit and limit is None:
            return None
        together = _emit_joined if products else _emit_together
        return together(kernel, parts, units.arch, limit, strict=strict)
    blocked = block(kernel, units.arch)
    chosen = config or tail.with_room(candidates(blocked, units)[0], kernel)
    loops = turns.depth(blocked, chosen) if chosen.groups else int(chosen.persistent)
    layout = lay_out(blocked, chosen, loops, within_limit=within_limit)
    if kernel.awaited:
        steps = [tail.of_tile(kernel, layout)]
    else:
        steps = tail.followers(kernel, chosen.num_warps, units, within_limit=within_limit)
    limit = limit_of([layout, *(step.layout for step in steps)]) if within_limit else None
    if within_limit and limit is None:
        return None
    hosted: dict[str, Hosted] = {}
    if chosen.groups:
        functions = _in_groups(layout, kernel.name, units.arch, strict=strict)
    elif chosen.persistent and not steps:
        functions = [_function(layout, kernel.name, units.arch, hosted=hosted, strict=strict)]
    else:
        functions = [_function(step.layout, step.name, units.arch, behind=step.behind, strict=strict) for step in steps]
        functions.append(_function(layout, kernel.name, units.arch, steps=steps, strict=strict))
    count = " * ".join(blocks_of(layout, dim) for dim in layout.blocked.grid()) or "1"
    tiles = " * ".join(blocks_of(layout, dim) for dim in layout.blocked.grid() if dim.name != "b" and kernel.awaited)
    launch = Launch(kernel, layout.config, layout.constants, count, limit, tiles, hosted)
    return file_of(launch, functions, strict=strict)


def _emit_together(kernel: Kernel, parts: Sequence[Part], arch: str, limit: str | None, *, strict: bool) -> str:
    """The source of a kernel with others beside it: a function for each, and the one that is launched."""
    functions = [_function(part.layout, part.name, arch, part=True, strict=strict) for part in parts]
    lines = beside.dispatch(parts)
    functions.append("\n".join([*signature(kernel, kernel.name, {}, []), *(INDENT + line for line in lines)]))
    count = " + ".join(part.blocks for part in parts)
    return file_of(Launch(kernel, parts[0].layout.config, {}, count, limit), functions, strict=strict)


def _emit_joined(kernel: Kernel, parts: Sequence[Part], arch: str, limit: str | None, *, strict: bool) -> str:
    """The source of products that are one walk."""
    layouts = [part.layout for part in parts]
    constants = layouts[0].constants
    taken = [*map(argument, kernel.params), *(size.name for size in kernel.sizes), *constants]
    values = _values(layouts[0], Names([*taken, kernel.name, *prelude.FUNCTIONS]), strict=strict)
    hosted: dict[str, Hosted] = {}
    values.hosted = hosted
    lines = joined.lines(values, layouts, arch)
    head = signature(kernel, kernel.name, passed(hosted), list(constants))
    function = "\n".join([*head, *(INDENT + line for line in lines)])

    def blocks(name: str) -> list[str]:
        return [blocks_of(layout, dim) for layout in layouts for dim in layout.blocked.grid() if dim.name == name]

    count = f"{blocks('m')[0]} * ({' + '.join(blocks('n'))})"
    launch = Launch(kernel, layouts[0].config, constants, count, limit, hosted=hosted)
    return file_of(launch, [function], strict=strict)


def _function(
    layout: Layout,
    name: str,
    arch: str,
    *,
    steps: Sequence[Follower] = (),
    behind: frozenset[str] = frozenset(),
    part: bool = False,
    hosted: dict[str, Hosted] | None = None,
    strict: bool = False,
) -> str:
    """The `@triton.jit` function of one kernel, which `steps` follow; `behind`: see `Follower`.

    As a `part` of a launch it is told which of its programs runs.  What it adds to `hosted` it is passed.
    """
    kernel = layout.blocked.kernel
    counted, told = [tail.COUNTER] if steps else [], [beside.PROGRAM] if part else []
    starts = {dim: tail.start_of(dim) for dim in layout.blocked.grid()} if behind else {}
    told += starts.values()
    constants = list(layout.constants)
    taken = [*map(argument, kernel.params), *(size.name for size in kernel.sizes), *constants]
    taken += [*told, *counted, *(["done"] if steps else []), *(step.name for step in steps)]
    names = Names([*taken, name, *prelude.FUNCTIONS])
    values = _values(layout, names, behind=behind, strict=strict)
    values.program, values.hosted = beside.PROGRAM if part else values.program, hosted
    values.starts.update(starts)
    written = Body(values, arch)
    if not steps and not part:
        return_unchanged(values)
    lines = written.lines()
    if kernel.awaited:
        lines += tail.ending_of_tile(steps[0], values.block, sympy.Mul(*(axis.size for axis in kernel.awaited)))
    elif steps:
        lines += tail.ending(steps)
    given = dict.fromkeys(counted, "int32: finished programs, 0 between launches") | passed(hosted or {})
    return "\n".join([*signature(kernel, name, given, constants, told), *(INDENT + line for line in lines)])


def _values(layout: Layout, names: Names, *, behind: frozenset[str] = frozenset(), strict: bool) -> Values:
    """What writes the expressions of one function."""
    fast, zero_fill = is_rounded(layout.blocked.kernel) and not strict, layout.blocked.contraction
    if fast:
        layout = replace(layout, blocked=replace(layout.blocked, body=as_sigmoids(layout.blocked.body)))
    values = Values(layout, names, fast=fast, zero_fill=zero_fill, behind=behind)
    values.quick = frozenset() if strict else rounded_parts(layout.blocked.body)
    return values


def _in_groups(layout: Layout, name: str, arch: str, *, strict: bool) -> list[str]:
    """The functions of a program whose warps do different things; the last one is launched."""
    kernel = layout.blocked.kernel
    constants = list(layout.constants)
    params = [*map(argument, kernel.params), *(size.name for size in kernel.sizes)]
    form = Ahead(layout, Given(params, constants))
    taken = [*form.fetch_takes, *form.compute_takes, *form.reserved, "gl", "gluon", "hopper", name]

    def values() -> Values:
        return _values(layout, Names([*taken, *prelude.FUNCTIONS]), strict=strict)

    def function(suffix: str, takes: Sequence[str], lines: Sequence[str]) -> str:
        typed = (f"{each}: tl.constexpr" if each in (*constants, GROUP) else each for each in takes)
        head = ["@gluon.jit", f"def {name}_{suffix}(", *(f"{INDENT}{each}," for each in typed), "):"]
        return "\n".join([*head, *(INDENT + line for line in in_gluon(lines))])

    launched = ["@gluon.jit", *signature(kernel, name, {}, constants)[1:]]
    return [
        function("fetch", form.fetch_takes, form.fetch(values())),
        function("compute", [GROUP, *form.compute_takes], form.compute(values(), arch)),
        "\n".join([*launched, *(INDENT + line for line in form.launched(values(), name))]),
    ]
