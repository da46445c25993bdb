"""Emit: a Kernel as the text of a Python file.

What enters is a Kernel; what leaves is a file that stands on its own: where its operations come from, the device
functions it needs, the `@triton.jit` kernel, its configuration, its grid, and a `launch` that anyone can call.  It is
imported and compiled as it is, so an edited file is an edited kernel.  Equal kernels give equal text (up to the
comments on their origin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.triton import beside, joined, tail
from fusion.codegen.triton.ahead import Ahead
from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.beside import Part
from fusion.codegen.triton.blocks import Config, block
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.choices import candidates
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.expressions.limits import limit_of
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.expressions.scopes import Names
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import INDENT, Launch, blocks_of, file_of, passed, signature
from fusion.codegen.triton.products import turns
from fusion.codegen.triton.products.functions import Function
from fusion.codegen.triton.products.groups import Given, in_gluon
from fusion.codegen.triton.rewrites.exponentials import shares_in_powers_of_two
from fusion.codegen.triton.rewrites.rounding import is_rounded, rounded_parts
from fusion.codegen.triton.rewrites.sigmoids import as_sigmoids
from fusion.codegen.triton.statements.unchanged import return_unchanged
from fusion.codegen.triton.tail import Follower
from fusion.lowering.kernel import Kernel


def emit(
    kernel: Kernel,
    config: Config | None = None,
    *,
    device: Device,
    numerics: Numerics = DEFAULT,
    wide: bool = False,
) -> str:
    """The source of `kernel` for `device`, in `config` or in the default configuration.

    Of symbolic sizes it takes those with which all indices fit into 32 bits, as its function `fits` says of them; it
    takes any where `wide` is asked for, or where there is no such limit (`limits`).
    """
    writer = _Writer(device, numerics, within_limit=bool(kernel.sizes) and not wide)
    text = writer.text(kernel, config)
    if text is None:  # no sizes are within a limit
        text = replace(writer, within_limit=False).text(kernel, config)
    assert text is not None
    return text


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes kernels for one machine.

    Attributes:
        within_limit: for sizes with which all indices fit into 32 bits, or else for any.
    """

    device: Device
    numerics: Numerics
    within_limit: bool

    def text(self, kernel: Kernel, config: Config | None) -> str | None:
        """The source; None where it is to be for sizes within a limit, and there is none."""
        if kernel.beside:
            return self._side_by_side(kernel)
        blocked = block(kernel, self.device)
        chosen = config or tail.with_room(candidates(blocked, self.numerics)[0], kernel, self.device)
        loops = turns.depth(blocked, chosen) if chosen.groups else int(chosen.persistent)
        layout = lay_out(blocked, chosen, loops, within_limit=self.within_limit)
        steps = [tail.of_tile(kernel, layout)] if kernel.awaited else self._followers(kernel, chosen.num_warps)
        limit = self._limit([layout, *(step.layout for step in steps)])
        if self.within_limit and limit is None:
            return None
        hosted: dict[str, Hosted] = {}
        if chosen.groups:
            functions = self._in_groups(layout, kernel.name)
        elif chosen.persistent and not steps:
            functions = [self._function(layout, kernel.name, hosted=hosted)]
        else:
            functions = [self._function(step.layout, step.name, behind=step.behind) for step in steps]
            functions.append(self._function(layout, kernel.name, steps=steps))
        grid = layout.blocked.grid()
        count = " * ".join(blocks_of(layout, dim) for dim in grid) or "1"
        tiles = " * ".join(blocks_of(layout, dim) for dim in grid if dim.name != "b" and kernel.awaited)
        launch = Launch(kernel, self.device, layout.config, layout.constants, count, limit, tiles, hosted)
        return file_of(launch, functions, strict=self.numerics.strict)

    def _followers(self, kernel: Kernel, warps: int) -> list[Follower]:
        """The kernels that follow one in its launch, laid out for its warps."""
        return tail.followers(kernel, warps, self.device, self.numerics, within_limit=self.within_limit)

    def _limit(self, layouts: Sequence[Layout]) -> str | None:
        """What has to be below 2³¹, where the source is to be for sizes with which it is."""
        return limit_of(layouts) if self.within_limit else None

    def _side_by_side(self, kernel: Kernel) -> str | None:
        """The source of a kernel with others beside it."""
        products = joined.products_of(kernel.parts, self.device)
        taken, joint = products or kernel.parts, bool(products)
        parts = beside.parts_of(
            taken, kernel.name, self.device, self.numerics, joined=joint, within_limit=self.within_limit
        )
        limit = self._limit([part.layout for part in parts])
        if self.within_limit and limit is None:
            return None
        return self._joined(kernel, parts, limit) if joint else self._together(kernel, parts, limit)

    def _together(self, kernel: Kernel, parts: Sequence[Part], limit: str | None) -> str:
        """The source of a kernel with others beside it: a function for each, and the one that is launched."""
        functions = [self._function(part.layout, part.name, part=True) for part in parts]
        lines = beside.dispatch(parts)
        functions.append("\n".join([*signature(kernel, kernel.name, {}, []), *(INDENT + line for line in lines)]))
        count = " + ".join(part.blocks for part in parts)
        return file_of(
            Launch(kernel, self.device, parts[0].layout.config, {}, count, limit),
            functions,
            strict=self.numerics.strict,
        )

    def _joined(self, kernel: Kernel, parts: Sequence[Part], limit: str | None) -> str:
        """The source of products that are one walk."""
        layouts = [part.layout for part in parts]
        constants = layouts[0].constants
        taken = [*map(argument, kernel.params), *(size.name for size in kernel.sizes), *constants]
        values = self._values(layouts[0], Names([*taken, kernel.name, *prelude.FUNCTIONS]))
        hosted: dict[str, Hosted] = {}
        values.hosted = hosted
        lines = joined.lines(values, layouts)
        head = signature(kernel, kernel.name, passed(hosted), list(constants))
        function = "\n".join([*head, *(INDENT + line for line in lines)])

        def blocks(name: str) -> list[str]:
            return [blocks_of(layout, dim) for layout in layouts for dim in layout.blocked.grid() if dim.name == name]

        count = f"{blocks('m')[0]} * ({' + '.join(blocks('n'))})"
        launch = Launch(kernel, self.device, layouts[0].config, constants, count, limit, hosted=hosted)
        return file_of(launch, [function], strict=self.numerics.strict)

    def _function(
        self,
        layout: Layout,
        name: str,
        *,
        steps: Sequence[Follower] = (),
        behind: frozenset[str] = frozenset(),
        part: bool = False,
        hosted: dict[str, Hosted] | None = None,
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
        values = self._values(layout, Names([*taken, name, *prelude.FUNCTIONS]), behind)
        values.program, values.hosted = beside.PROGRAM if part else values.program, hosted
        values.starts.update(starts)
        written = Body(values)
        if not steps and not part:
            return_unchanged(values)
        lines = written.lines()
        if kernel.awaited:
            parts = sympy.Mul(*(axis.size for axis in kernel.awaited))
            lines += tail.ending_of_tile(steps[0], values.block, parts)
        elif steps:
            lines += tail.ending(steps)
        given = dict.fromkeys(counted, "int32: finished programs, 0 between launches") | passed(hosted or {})
        return "\n".join([*signature(kernel, name, given, constants, told), *(INDENT + line for line in lines)])

    def _values(self, layout: Layout, names: Names, behind: frozenset[str] = frozenset()) -> Values:
        """What writes the expressions of one function."""
        fast, zero_fill = is_rounded(layout.blocked.kernel) and not self.numerics.strict, layout.blocked.contraction
        body = layout.blocked.body
        if fast:
            body = as_sigmoids(body)
        if not self.numerics.strict:
            quick = rounded_parts(body)
            body = shares_in_powers_of_two(body, lambda node: fast or node in quick)
            layout = replace(layout, blocked=replace(layout.blocked, body=body))
        values = Values(layout, names, fast=fast, zero_fill=zero_fill, behind=behind)
        values.quick = frozenset() if self.numerics.strict else rounded_parts(body)
        return values

    def _in_groups(self, layout: Layout, name: str) -> list[str]:
        """The functions of a program whose warps do different things; the last one is launched."""
        kernel = layout.blocked.kernel
        constants = list(layout.constants)
        params = [*map(argument, kernel.params), *(size.name for size in kernel.sizes)]
        form = Ahead(layout, Given(name, params, constants))
        taken = [*form.fetch_takes, *form.compute_takes, *form.reserved, "gl", "gluon", "hopper", name]

        def values() -> Values:
            return self._values(layout, Names([*taken, *prelude.FUNCTIONS]))

        def text(function: Function) -> str:
            typed = (f"{each}: tl.constexpr" if each in function.constants else each for each in function.takes)
            head = ["@gluon.jit", f"def {name}_{function.suffix}(", *(f"{INDENT}{each}," for each in typed), "):"]
            return "\n".join([*head, *(INDENT + line for line in in_gluon(function.lines))])

        launched = ["@gluon.jit", *signature(kernel, name, {}, constants)[1:]]
        return [
            *map(text, form.fetch(values())),
            *map(text, form.compute(values())),
            "\n".join([*launched, *(INDENT + line for line in form.launched(values()))]),
        ]
