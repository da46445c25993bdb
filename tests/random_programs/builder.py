"""Builds a random program: its statements so far, the values of their names, and attempts at the next one.

Each statement runs in eager as it is written, so that shapes, dtypes and values of all names are known.  Statements
that fail, or whose results are too large in extent or in number, are left out.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random_programs.crash_guards import Survived
from tests.random_programs.inputs import FLOATS, INTEGERS, Input
from tests.random_programs.program import Program

LARGEST = 1 << 14
"""Elements of a tensor, unless stated otherwise."""

WHOLE = (*range(-9, 10), 40, -40)
"""Integers that are passed."""

LOUDEST = 1e3
"""Of any finite number in a float result: beyond, 16-bit floats overflow and differences of large numbers say little.
"""

Choice = TypeVar("Choice")
Kind = Callable[[Tensor], bool]


def is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype is not torch.bool


def is_bool(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool


def is_number(tensor: Tensor) -> bool:
    return tensor.dtype is not torch.bool


def is_any(tensor: Tensor) -> bool:
    return True


class Builder:
    """Grows a program.

    `values` are the values of its names, in the order of their definition; `integers`, its arguments other than
    tensors.
    """

    def __init__(
        self, rng: random.Random, sizes: dict[str, int], seed: int, *, grads: bool, odd: bool, largest: int = LARGEST
    ) -> None:
        self.rng, self.sizes, self.seed = rng, sizes, seed
        self.grads, self.odd, self.largest = grads, odd, largest
        self.integers = {name: rng.choice(WHOLE) for name in ("n", "m")}
        self.inputs: list[Input] = []
        self.statements: list[str] = []
        self.values: dict[str, Tensor] = {}
        self.count = 0

    # Drawing ----------------------------------------------------------------------------------------------------------

    def one(self, options: Sequence[Choice]) -> Choice:
        """One of the options."""
        return options[self.rng.randrange(len(options))]

    def chance(self, share: float) -> bool:
        """True this often."""
        return self.rng.random() < share

    def operand(self, kind: Kind = is_any) -> str | None:
        """Return the name of a tensor of a kind, later ones more often; None if there is none."""
        names = [name for name, value in self.values.items() if kind(value)]
        if not names:
            return None
        weights = [1 + 3 * position for position in range(len(names))]
        return self.rng.choices(names, weights)[0]

    def matching(self, subject: str, kind: Kind, *, exactly: bool = False) -> str:
        """Return a tensor of a shape that is compatible with that of `subject`: an existing one, or a new input."""
        shape = self.values[subject].shape

        def fits(value: Tensor) -> bool:
            return kind(value) and (value.shape == shape if exactly else broadcasts(value.shape, shape))

        name = self.operand(fits) if self.chance(0.75) else None
        if name == subject and self.chance(0.8):  # x - x says little
            name = None
        return name or self.input(shape if exactly else self._narrowed(shape), kind)

    def shaped(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Return a tensor of this shape and dtype: an existing one, or a new input."""

        def fits(value: Tensor) -> bool:
            return value.dtype is dtype and tuple(value.shape) == tuple(shape)

        name = self.operand(fits) if self.chance(0.7) else None
        return name or self.input(shape, lambda value: value.dtype is dtype)

    def dim(self, name: str, kind: Callable[[int], bool] = lambda size: True) -> int | None:
        """A dimension of a tensor, counted from either end."""
        shape = self.values[name].shape
        dims = [k for k, size in enumerate(shape) if kind(size)]
        return None if not dims else self.one(dims) - (len(shape) if self.chance(0.5) else 0)

    def _narrowed(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts to this one."""
        kept = [1 if self.chance(0.25) else size for size in shape]
        return kept[self.rng.randrange(len(kept) + 1) if self.chance(0.3) else 0 :]

    # Growing ----------------------------------------------------------------------------------------------------------

    def input(self, shape: Sequence[int | str], kind: Kind = is_any, layout: str = "") -> str:
        """Add an argument; its named sizes are sizes of the call."""
        names = {size: name for name, size in self.sizes.items() if size > 1}
        while math.prod(self.sizes.get(dim, 0) if isinstance(dim, str) else dim for dim in shape) > self.largest:
            shape = shape[1:]
        dims = tuple(dim if isinstance(dim, str) else names.get(dim, dim) for dim in shape)
        dtypes = [dtype for dtype in WEIGHED_DTYPES if kind(torch.empty(0, dtype=dtype))]
        entry = Input(f"x{len(self.inputs)}", dims, self.one(dtypes), layout or self.one(WEIGHED_LAYOUTS))
        values = self.one(("normal", "normal", "positive", "grid", *(["special"] if self.odd else [])))
        if not entry.dtype.is_floating_point:
            values = "wide" if is_integer(torch.empty(0, dtype=entry.dtype)) and self.chance(0.1) else "normal"
        grad = self.grads and entry.dtype.is_floating_point and self.chance(0.85)
        entry = replace(entry, values=values, grad=grad)
        self.inputs.append(entry)
        self.values[entry.name] = self._argument(len(self.inputs) - 1)
        return entry.name

    def _argument(self, position: int) -> Tensor:
        return Program(tuple(self.inputs), "", (self.sizes,), seed=self.seed).tensors(0)[position]

    def add(self, expression: str) -> bool:
        """Add `name = expression` for a new name; return whether it was accepted."""
        return self.attempt(f"t{self.count} = {expression}", [f"t{self.count}"])

    def attempt(self, statement: str, targets: Sequence[str]) -> bool:
        """Run a statement that assigns to `targets`; return whether it was accepted."""
        space: dict[str, object] = {"torch": torch, "F": F, **self.integers, **self.values}
        before = {name: numbers(value) for name, value in self.values.items()}
        try:
            with Survived():
                exec(statement, space)
            results = {name: space[name] for name in targets}
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError):
            self.again()
            return False
        changed = [value for name, value in self.values.items() if not torch.equal(before[name], numbers(value))]
        if not all(isinstance(value, Tensor) and self.bearable(value) for value in [*results.values(), *changed]):
            self.again()
            return False
        self.values.update(results)  # type: ignore[arg-type]  # tensors, as was just seen
        self.statements.append(statement)
        self.count += len(targets)
        return True

    def again(self) -> None:
        """Run the statements so far again: a rejected one may have written to a tensor."""
        arguments = [self._argument(position) for position in range(len(self.inputs))]
        space: dict[str, object] = {"torch": torch, "F": F, **self.integers}
        space.update(zip((entry.name for entry in self.inputs), arguments, strict=True))
        for statement in self.statements:
            exec(statement, space)
        self.values = {name: space[name] for name in self.values}  # type: ignore[misc]  # tensors, as before

    def bearable(self, value: Tensor) -> bool:
        """Is a result small enough to compute with, and are its numbers informative?"""
        if value.numel() > self.largest or not value.is_floating_point() or not value.numel():
            return value.numel() <= self.largest
        finite = value.detach().isfinite()
        if not finite.all() and not self.odd:
            return False
        kept = value.detach().double()[finite]
        return not kept.numel() or float(kept.abs().max()) <= LOUDEST

    # What came of it --------------------------------------------------------------------------------------------------

    def results(self) -> list[str]:
        """Return the names that nothing reads, and a few others."""
        read = {name for statement in self.statements for name in names_read(statement)}
        outcomes = [name for name in self.values if name.startswith("t")]
        actual = [name for name in outcomes if name not in read]
        actual += [name for name in outcomes if name in read and self.chance(0.15)]
        return actual or list(self.values)[-1:]


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Can a tensor of `shape` be expanded to `to`?"""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def names_read(statement: str) -> list[str]:
    """The names that a statement reads."""
    nodes = ast.walk(ast.parse(statement))
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def numbers(value: Tensor) -> Tensor:
    """Return a copy in which nearly equal numbers have the same bits."""
    copy = value.detach().clone()
    return copy.nan_to_num(nan=math.pi) if copy.is_floating_point() else copy


WEIGHED_DTYPES = (
    *(torch.float32,) * 8,
    *(torch.float16, torch.bfloat16) * 2,
    torch.float64,
    *(torch.int64,) * 3,
    *(torch.int32, torch.uint8),
    *(torch.bool,) * 2,
)
WEIGHED_LAYOUTS = (
    *("contiguous",) * 6,
    *("transposed",) * 2,
    *("reversed", "stepped", "padded", "offset", "expanded"),
)
__all__ = ["FLOATS", "INTEGERS", "Builder", "is_any", "is_bool", "is_float", "is_integer", "is_number"]
