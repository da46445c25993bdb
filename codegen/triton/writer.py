"""Writes one `@triton.jit` function of a kernel, from its first line to its last.

Input: the layout of a kernel, and the function by which its form opens the program (`Open`); output: a function as
code.  Forms (`forms`) decide which functions a launch has and in which order they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fusion.codegen.numerics import Numerics
from fusion.codegen.scaled import factor_in_place
from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.code import COMPARE, Code, as_code
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.limits import limit_of
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.expressions.scopes import Identifiers
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import descriptor_comments, function_of, launched_function, signature
from fusion.codegen.triton.rewrites.exponentials import softmax_in_powers_of_two
from fusion.codegen.triton.rewrites.rounding import is_rounded, rounded_parts, under_logarithms
from fusion.codegen.triton.rewrites.sigmoids import as_sigmoids
from fusion.lowering.ir.expr import Expr, Load, TileRef, index_symbols, loads, postorder
from fusion.lowering.ir.kernel import Role, statements, values_of

Open: TypeAlias = Callable[[Body], None]
"""Adds the lines of a program: the start of its block, and its statements."""


def one_block(body: Body) -> None:
    """Add the lines of a program that computes one block; the numbers of a row arrive while it is folded.

    Positions among them are not loaded first: the row would be loaded only after they have arrived and been checked
    (measured: docs/performance.md, `writer`).
    """
    body.assign_block()
    for load in loads_of_the_row(body.values):
        if not list(loads(*load.children())):
            body.values.load_now(load)
    body.statements()


def loads_of_the_row(values: Values) -> list[Load]:
    """Return the loads at one place for each program, in order, that need no fold and nothing that is stored."""
    blocked, tiled, early = values.layout.blocked, values.layout.tiled, dict[Expr, bool]()
    if blocked.contraction or all(dim.role is Role.GRID for dim in blocked.dims):
        return []
    roots = [value for stmt in statements(blocked.body) for value in values_of(stmt)]
    of_tiles = {dim.symbol for dim in blocked.dims if dim in tiled or dim.role is not Role.GRID}
    for node in postorder(*roots):
        own = not isinstance(node, TileRef) and of_tiles.isdisjoint(index_symbols(node))
        early[node] = own and not values.is_overwritten([node]) and all(early[child] for child in node.children())
    return [node for node in early if isinstance(node, Load) and early[node]]


@dataclass(frozen=True, slots=True)
class FunctionRole:
    """The role of a function in a launch of several; by default the role of a function launched alone.

    Attributes:
        program: the parameter with the number of its program; empty where `tl.program_id` is that number.
        starts: parameters with the starts of blocks of GRID dimensions.
        behind: the tensors that other functions of the launch write before this one runs.
        ending: returns its last lines; called with the emitter of its expressions.
        counters: further parameters, with a comment on each.
        reserved: other names that its lines use.
    """

    program: str = ""
    starts: Mapping[Dim, str] = field(default_factory=dict)
    behind: frozenset[str] = frozenset()
    ending: Callable[[Values], list[Code]] | None = None
    counters: Mapping[str, str] = field(default_factory=dict)
    reserved: Sequence[str] = ()

    @property
    def is_called(self) -> bool:
        """Whether another function of the launch calls it."""
        return bool(self.program or self.starts or self.behind)


WHOLE_KERNEL = FunctionRole()


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the functions of kernels for one device.

    Attributes:
        within_limit: the source is for sizes with which all indices fit into 32 bits, rather than for any.
    """

    device: Device
    numerics: Numerics
    within_limit: bool

    def limit(self, layouts: Sequence[Layout]) -> str | None:
        """Return the expression that must be below 2³¹, as Python text, if the source is for sizes within a limit."""
        return limit_of(layouts) if self.within_limit else None

    def function(
        self,
        layout: Layout,
        name: str,
        open_: Open = one_block,
        *,
        role: FunctionRole = WHOLE_KERNEL,
        hosted: dict[str, Hosted] | None = None,
    ) -> Code:
        """Return the `@triton.jit` function of one kernel.  Descriptors that it adds to `hosted` are passed to it."""
        kernel = layout.blocked.kernel
        leading = [*([role.program] if role.program else []), *role.starts.values()]
        constants = list(layout.constants)
        names = [*map(argument, kernel.params), *(size.name for size in kernel.sizes), *constants]
        names += [*leading, *role.counters, *role.reserved]
        values = self.values(layout, Identifiers([*names, name, *prelude.FUNCTIONS]), role.behind)
        values.program, values.hosted = as_code(role.program) if role.program else values.program, hosted
        values.starts.update({dim: as_code(start) for dim, start in role.starts.items()})
        body = Body(values)
        if role.ending is None and not role.program:
            _return_if_factor_is_one(values)
        open_(body)
        lines = values.scopes[0].lines + (role.ending(values) if role.ending is not None else [])
        further = {**role.counters, **descriptor_comments(hosted or {})}
        head = signature(kernel, name, further, constants, leading)
        return function_of(head, lines) if role.is_called else launched_function(head, lines, self.device)

    def values(self, layout: Layout, names: Identifiers, behind: frozenset[str] = frozenset()) -> Values:
        """Return the emitter of the expressions of one function; `behind`: see `FunctionRole`."""
        fast, zero_fill = is_rounded(layout.blocked.kernel) and not self.numerics.strict, layout.blocked.contraction
        body = layout.blocked.body
        if fast:
            body = as_sigmoids(body)
        if not self.numerics.strict:
            quick = rounded_parts(layout.blocked.kernel, body) | under_logarithms(layout.blocked.kernel, body)
            body = softmax_in_powers_of_two(body, lambda node: fast or node in quick)
            layout = replace(layout, blocked=replace(layout.blocked, body=body))
        values = Values(layout, names, fast=fast, zero_fill=zero_fill, behind=behind)
        values.quick = frozenset() if self.numerics.strict else rounded_parts(layout.blocked.kernel, body)
        return values


def _return_if_factor_is_one(values: Values) -> None:
    """Add the lines that return at once if every store would multiply by 1, and so leave memory unchanged."""
    number = factor_in_place(values.layout.blocked.kernel, values.layout.blocked.body)
    if number is not None:
        values.line("if {} == 1.0:", values.value(number).code.at(COMPARE + 1))
        values.line("    return  # times 1 everything stays as it is")
