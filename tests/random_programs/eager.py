"""Eager's run of a call, its run without roundings, and the error that eager may have.

Ground truth is a run in float64.  Eager's own error is the largest of a few runs, on inputs and incoming gradients that
are off by some percent in each, so that it is not small by chance.  The amplification of small errors by a program is
measured by a few further runs in float64 whose inputs are off by a rounding of the shortest float in it.  Where that
does not explain a difference, two more effects count as eager's error: a rounding of the means of layer norms, and
conversions that the program asks for, where eager rounds again and happens to undo it.  Integers, infinities and NaN
may be as in a run in which each operation is off by one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property

import torch
from torch import Tensor

from tests.random_programs.captured import DECOMPOSED, captured
from tests.random_programs.comparing import Allowed, error
from tests.random_programs.inputs import SHARED
from tests.random_programs.means import Means
from tests.random_programs.products import Products
from tests.random_programs.reversed_means import Backwards
from tests.random_programs.roundings import Roundings
from tests.random_programs.runs import Call, Run

SHIFT = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""A rounding or two of each dtype."""

OTHER = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)
"""Shifts that produce other inputs, on which eager's error differs."""

ROUNDED = 16
"""Runs in which every operation is off by a rounding, if an integer, an infinity or a NaN seems wrong."""


class RefusedError(Exception):
    """Eager refuses a call: there is nothing to compare with."""


class Eager:
    """Eager's runs of one call; each is computed at its first use."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._exact: dict[tuple[float, bool, bool | None], Run | None] = {}

    @cached_property
    def run(self) -> Run:
        """The call itself.

        Raises:
            RefusedError: eager raises.
        """
        try:
            return self.call.run()
        except Exception as failure:
            raise RefusedError from failure

    def allowances(self, name: str) -> Iterator[Allowed]:
        """Yield the allowed values of a tensor of the call, each time from more runs."""
        theirs = self.run.tensors[name]
        assert theirs is not None
        shifts = [factor * self.step for factor in (0.0, 1, -1, 0.8, -0.8, 0.6)]
        if not theirs.is_floating_point():
            shifts += [2 * self.step, -2 * self.step]  # rounded more than once
            truths = _named(name, [self.exact(shift) for shift in shifts])
            yield Allowed(truths)
            yield Allowed([*truths, *_named(name, self._rounded)])
            return
        truths = _named(name, [self.exact(shift) for shift in shifts])
        usual = max(each.get(name, 0.0) for each in self._errors)
        yield Allowed(truths, usual)
        usual = max(usual, *(each.get(name, 0.0) for each in self._changes))
        forms = _named(name, self._forms)
        yield Allowed(truths, usual, forms)
        # times an infinity, a number is of its sign or NaN, and a rounding may decide which
        yield Allowed(truths, usual, [*forms, *_named(name, self._rounded)])

    @cached_property
    def step(self) -> float:
        """A rounding of the shortest float in the program, float32 at least."""
        program = self.call.program
        used = {torch.float32, *(entry.dtype for entry in program.inputs)}
        return max(shift for dtype, shift in SHIFT.items() if dtype in used or str(dtype) in program.source)

    def exact(self, shift: float = 0.0, *, apart: bool = False, rounded: bool | None = None) -> Run | None:
        """The call in float64, where it can be had, on inputs that are off by up to `shift`.

        With `apart`, elements in one place in memory are off by different amounts.  Unless `rounded` is None, casts
        give copies, which are `rounded` or not.
        """
        key = shift, apart, rounded
        if key not in self._exact:
            self._exact[key] = self._in_float64(shift, apart=apart, rounded=rounded)
        return self._exact[key]

    def _in_float64(
        self,
        shift: float = 0.0,
        *,
        apart: bool = False,
        rounded: bool | None = None,
        mode: AbstractContextManager[object] | None = None,
    ) -> Run | None:
        """The same, in a `mode` that changes operations."""
        gradient = shift if shift in OTHER else 0.0
        torch.set_default_dtype(torch.float64)
        try:
            # autograd may miss an overwrite if a cast is none any more
            for copies in (False, True) if rounded is None else (True,):
                function = self.call.program.function(wide=True, copies=copies, rounded=bool(rounded))
                with suppress(RuntimeError), mode or nullcontext():
                    return self.call.run(function, wide=True, shift=shift, apart=apart, gradient=gradient)
        finally:
            torch.set_default_dtype(torch.float32)
        return None

    # Eager's error, in each float tensor ---------------------------------------------------------------------------

    @property
    def _has_shared(self) -> bool:
        """Do several elements of an input share memory?"""
        return any(entry.layout in SHARED for entry in self.call.program.inputs)

    @cached_property
    def _errors(self) -> list[dict[str, float]]:
        """Return eager's largest errors on other inputs.

        Rows that share their memory are rounded alike, and their sum is off by as many times as there are rows; where
        they are `apart`, roundings that are zero by chance are not zero in all of them.  Both may be eager's
        error.  Sums of equal numbers may even be exact in eager's order, and in no other: the change of a sum when
        equal numbers are off by different roundings is its error, too.  There each addition rounds in the same
        direction, so more than one rounding is applied.
        """
        ways = (True, False) if self._has_shared else (False,)
        errors = [self._error(shift, apart=apart) for shift in OTHER for apart in ways]
        if self._has_shared:
            errors.append(_largest(self.exact(2 * self.step, apart=True), self.exact(apart=True)))
        return errors

    def _error(self, shift: float, *, apart: bool) -> dict[str, float]:
        with suppress(RuntimeError):
            own = self.call.run(shift=shift, apart=apart, gradient=shift)
            return _largest(own, self._in_float64(shift, apart=apart))
        return {}

    @cached_property
    def _changes(self) -> list[dict[str, float]]:
        """Return by how much results change where means are off, and where only conversions round.

        The compiler does not round the operations after a conversion in a short float; where eager does, it may undo
        that change.
        """
        conversions = _largest(self.exact(rounded=True), self.exact(rounded=False))
        return [_largest(self._means[0], self.exact()), conversions]

    # Other forms of the program ------------------------------------------------------------------------------------

    @cached_property
    def _means(self) -> list[Run | None]:
        """The means of layer norms off by a rounding, up and down."""
        rounding = SHIFT[torch.float32]
        return [self._in_float64(mode=Means(off)) for off in (rounding, -rounding)]

    @cached_property
    def _forms(self) -> list[Run | None]:
        """Return runs in which an infinity or NaN arises in other ways."""
        return [
            captured(self.call, DECOMPOSED),
            self._in_float64(mode=Backwards()),
            *self._means,
            self._in_order(),
        ]

    def _in_order(self) -> Run | None:
        """The run with products computed from number to number, if there is one: overflows on the way differ."""
        with suppress(RuntimeError), Products():
            return self.call.run()
        return None

    @cached_property
    def _rounded(self) -> list[Run | None]:
        """Float64 with every operation off by up to a rounding or two."""
        return [self._in_float64(mode=Roundings((1 + k % 2) * self.step, k)) for k in range(ROUNDED)]


def _named(name: str, runs: Sequence[Run | None]) -> list[Tensor]:
    """Return a tensor in each run that succeeded."""
    return [tensor for run in runs if run is not None and (tensor := run.tensors.get(name)) is not None]


def _largest(one: Run | None, exact: Run | None) -> dict[str, float]:
    """The largest difference of two runs in each float tensor."""
    result: dict[str, float] = {}
    for name, tensor in ({} if one is None or exact is None else one.tensors).items():
        truth = exact.tensors.get(name)
        if tensor is not None and truth is not None and tensor.shape == truth.shape and tensor.is_floating_point():
            errors = error(tensor.double(), truth.double())
            result[name] = float(errors.max()) if errors.numel() else 0.0
    return result
