"""Compares the results of a program with eager's and with a float64 run's.

Input: a program, its inputs, and how to compile it; output: the error of every result, of every input and buffer that
it may change, and of every gradient.  All runs start from equal inputs, equal state and an equal seed.

Without tolerances a result agrees as `docs/numerics.md` promises: its error against float64 is at most twice eager's
own, plus a rounding of the largest number.  Where the program cannot run in float64, PyTorch's tolerances for its dtype
decide.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

import torch
from torch.utils import _pytree as pytree

from fusion.inspect.report import Report
from fusion.lowering.errors import FusionError, brief
from fusion.lowering.interpret.evaluate import flat_view

Program: TypeAlias = Callable[..., object]
Given: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
"""The positional and the named arguments of a call."""
Values: TypeAlias = Mapping[str, object]
"""Name of a result, an input, a buffer or a gradient → its value after a run."""

SEED = 0
REFERENCES = ("eager", "float64")


class NotComparable(FusionError):
    """The results of a program vary from run to run in eager, or are no numbers, so that no run can be compared."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """States how far a number may be from the reference: |number − reference| ≤ atol + rtol · |reference|.

    Attributes:
        rtol, atol: None leaves both to the rule above; where one is given, the other is 0.
        against: the reference, "eager" or "float64".
    """

    rtol: float | None = None
    atol: float | None = None
    against: str = "eager"

    def __post_init__(self) -> None:
        """Refuse invalid tolerances.

        Raises:
            ValueError: a negative number, NaN, or another reference.
        """
        if self.against not in REFERENCES:
            raise ValueError(f"unknown reference {self.against!r}; known: {', '.join(REFERENCES)}")
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")

    @property
    def is_given(self) -> bool:
        """Whether numbers decide, and not the rule."""
        return self.rtol is not None or self.atol is not None

    def __str__(self) -> str:
        return f"{self.atol or 0.0:g} + {self.rtol or 0.0:g} of {self.against}'s"


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """One value of a program, compared.

    Attributes:
        name: "result", "result[0]", "gradient of weight", "input 0", "buffer running_mean".
        difference: the largest difference from eager; infinite where NaN or an infinity is at another place.
        error: the largest error against float64; None without a float64 run.
        eager_error: eager's own.
        allowed: the error, or the difference, that agrees; None if each element has its own tolerance.
        fault: why it does not agree; empty if it does.
    """

    name: str
    difference: float
    error: float | None = None
    eager_error: float | None = None
    allowed: float | None = None
    fault: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the value is within the tolerance."""
        return not self.fault

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DIFFERS"
        text = f"{verdict}: {self.name}: at most {self.difference:.1e} from eager"
        if self.error is not None:
            text += f"; error against float64 {self.error:.1e}, eager's {self.eager_error:.1e}"
        return f"{text}; {self.fault}" if self.fault else text


@dataclass(frozen=True, slots=True)
class Agreement:
    """Holds the comparison of every value of a run.

    Attributes:
        values: a comparison for each value, in order.
        note: why there is no float64 run, and which regions run eagerly, so that nothing was compared; else empty.
        reports: of the graphs that were compared.
    """

    values: tuple[ComparedValue, ...]
    note: str = ""
    reports: tuple[Report, ...] = field(default=(), repr=False, compare=False)

    @property
    def agrees(self) -> bool:
        """Whether all values agree."""
        return all(value.agrees for value in self.values)

    @property
    def differing(self) -> tuple[ComparedValue, ...]:
        """The values that do not agree."""
        return tuple(value for value in self.values if not value.agrees)

    @property
    def compiled(self) -> bool:
        """Whether a kernel was generated: otherwise there was nothing to compare with eager."""
        return any(report.kernels for report in self.reports)

    def with_reports(self, reports: Sequence[Report]) -> Agreement:
        """Return this with the reports of the graphs, and a note about code that was not compiled."""
        eager = [f"{report.label} runs eagerly: {report.failure}" for report in reports if report.failure]
        reported = replace(self, reports=tuple(reports))
        nothing = [] if reported.compiled else ["no kernel was generated: eager was compared with itself"]
        return replace(reported, note="; ".join(filter(None, [self.note, *eager, *nothing])))

    def __str__(self) -> str:
        lines = [str(value) for value in self.values] or ["agrees: nothing was computed"]
        return "\n".join([*lines, *([f"note: {self.note}"] if self.note else [])])


class ComparedRuns:
    """Runs a program from equal inputs and equal state, and compares runs with eager.

    Args:
        program: a function or an `nn.Module`; it is left as it is.
        args, kwargs: its arguments; tensors are copied for each run.
        tolerance: the largest difference of values that agree.
        gradients: whether backward runs too, from random cotangents, if a result requires gradients.
        random: whether results may differ from seed to seed; these are then not compared.

    Raises:
        NotComparable: eager runs with different seeds differ and may not, there is no float64 run, which is the
            reference, or a value is no dense tensor with numbers.
    """

    def __init__(
        self,
        program: Program,
        args: Sequence[object],
        kwargs: Mapping[str, object] | None = None,
        tolerance: Tolerance = Tolerance(),
        *,
        gradients: bool = True,
        random: bool = False,
    ) -> None:
        given = pytree.tree_map_only(torch.Tensor, _leaf, (tuple(args), dict(kwargs or {})))
        self._program, self._given = program, cast("Given", given)
        self._tolerance, self._gradients = tolerance, gradients
        self._before = dict(_state(program, self._given))
        self.eager = self.run(lambda program: program)
        _refuse_without_numbers(self.eager)
        self.exact, self.note = self._in_float64()
        if tolerance.is_given and tolerance.against == "float64" and self.exact is None:
            raise NotComparable(self.note, hint="compare it with eager")
        drawn = self._drawn()
        if drawn and not random:
            message = f"the program draws random numbers: its {drawn[0]} differs from seed to seed in eager"
            raise NotComparable(message, hint="compare it in eval mode, or without dropout")
        if drawn:
            what = f"{drawn[0]}{f' and {len(drawn) - 1} others' * (len(drawn) > 1)}"
            self.note = "; ".join(filter(None, [self.note, f"not compared with eager, as it is random: {what}"]))
        self._random = frozenset(drawn)

    def run(self, compiled: Callable[[Program], Program], *, seed: int = SEED) -> Values:
        """Compile the program with `compiled`, run it, and return its values."""
        program, given = self._copies()
        return self._values(program, compiled, given, seed)

    def repeated(self, compiled: Callable[[Program], Program]) -> Callable[[], Values]:
        """Return a function that runs one copy of the program, compiled with `compiled`, each time from equal state.

        It is compiled once, unlike by `run`.
        """
        program, given = self._copies()
        call = compiled(program)
        tensors = [each for _, each in _state(program, given) if isinstance(each, torch.Tensor)]
        tensors += program.parameters() if isinstance(program, torch.nn.Module) else []
        before = [(each, flat_view(each.detach()).clone()) for each in tensors if each.layout is torch.strided]

        def again() -> Values:
            for tensor, memory in before:
                flat_view(tensor.detach()).copy_(memory)
            return self._values(program, lambda program: call, given, SEED)

        return again

    def agreement(self, values: Values, tolerance: Tolerance | None = None) -> Agreement:
        """Compare the values of a run, by another tolerance if one is given."""
        return Agreement(tuple(self._compared(values, tolerance or self._tolerance)), self.note)

    def _copies(self) -> tuple[Program, Given]:
        """Return copies of the program and its inputs, which share tensors where the originals do."""
        return copy.deepcopy((self._program, self._given))

    def _values(self, program: Program, compiled: Callable[[Program], Program], given: Given, seed: int) -> Values:
        torch.manual_seed(seed)
        result = compiled(program)(*given[0], **given[1])
        values = {**dict(_named("result", result)), **dict(_state(program, given))}
        if self._gradients:
            values.update(_gradients_of(result, program, given))
        return {name: _detached(value) for name, value in values.items()}

    def _in_float64(self) -> tuple[Values | None, str]:
        """Return the values of a run in float64; None, and the reason, if it cannot run there."""
        try:
            with _default_dtype(torch.float64):
                program, given = self._copies()
                if isinstance(program, torch.nn.Module):
                    program = program.double()
                doubled = cast("Given", pytree.tree_map_only(torch.Tensor, _doubled, given))
                exact = self._values(program, lambda program: program, doubled, SEED)
        except Exception as error:  # whatever the program does: it was not written for float64
            return None, f"the program does not run in float64 ({type(error).__name__}: {brief(error)})"
        narrow = [name for name, value in exact.items() if _is_narrow(value)]
        if narrow or exact.keys() != self.eager.keys():
            return None, f"in float64 the program still computes in other dtypes ({', '.join(narrow[:3])})"
        return exact, ""

    def _drawn(self) -> list[str]:
        """Return the names of the values that differ from seed to seed in eager."""
        other = self.run(lambda program: program, seed=SEED + 1)
        return [name for name, value in self.eager.items() if name in other and not _same_numbers(value, other[name])]

    def _compared(self, values: Values, tolerance: Tolerance) -> Iterator[ComparedValue]:
        for name, expected in self.eager.items():
            if name not in values:
                yield ComparedValue(name, math.inf, fault="it is missing")
            elif name in self._random or (
                self._is_unchanged(name, expected) and self._is_unchanged(name, values[name])
            ):
                continue
            elif not isinstance(expected, torch.Tensor):
                same = values[name] == expected
                yield ComparedValue(name, 0.0 if same else math.inf, fault="" if same else "it is another object")
            else:
                yield self._of_tensor(name, values[name], expected, tolerance)
        for name in values.keys() - self.eager.keys():
            yield ComparedValue(name, math.inf, fault="eager has no such value")

    def _is_unchanged(self, name: str, value: object) -> bool:
        """Return whether a value is an input or a buffer that the run left as it was."""
        before = self._before.get(name)
        if not isinstance(before, torch.Tensor) or not isinstance(value, torch.Tensor):
            return False
        return before.shape == value.shape and not _beyond(value, before, 0.0, 0.0)

    def _of_tensor(self, name: str, ours: object, eager: torch.Tensor, tolerance: Tolerance) -> ComparedValue:
        if not isinstance(ours, torch.Tensor):
            return ComparedValue(name, math.inf, fault=f"it is a {type(ours).__name__}")
        kind, wanted = ((each.dtype, tuple(each.shape), each.device) for each in (ours, eager))
        if kind != wanted:
            return ComparedValue(name, math.inf, fault=f"it is {_described(ours)}, eager's is {_described(eager)}")
        exact = None if self.exact is None else self.exact[name]
        assert exact is None or isinstance(exact, torch.Tensor)
        return judged(name, ours, eager, exact, tolerance)


def judged(
    name: str, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, tolerance: Tolerance
) -> ComparedValue:
    """Compare a tensor with eager's and, where there is one, with the float64 result."""
    difference = largest_error(ours, eager)
    error, eager_error = (None, None) if exact is None else (largest_error(ours, exact), largest_error(eager, exact))
    if tolerance.is_given:
        reference = exact if tolerance.against == "float64" else eager
        assert reference is not None
        wrong = _beyond(ours, reference, tolerance.rtol or 0.0, tolerance.atol or 0.0)
        fault = f"{wrong} of {ours.numel()} elements are not within {tolerance}" if wrong else ""
        return ComparedValue(name, difference, error, eager_error, None, fault)
    if error is None or eager_error is None:
        rtol, atol = _default_tolerances(ours)
        wrong = _beyond(ours, eager, rtol, atol)
        fault = f"{wrong} of {ours.numel()} elements are not within {Tolerance(rtol, atol)}" if wrong else ""
        return ComparedValue(name, difference, fault=fault)
    assert exact is not None
    if not (ours.is_floating_point() or ours.is_complex()):
        wrong = int(((ours != eager) & (ours != exact)).sum())
        return ComparedValue(
            name, difference, error, eager_error, 0.0, f"{wrong} elements are other numbers" * bool(wrong)
        )
    allowed = 2 * eager_error + torch.finfo(ours.dtype).eps * _largest(exact)
    fault = "" if error <= allowed else f"{error:.1e} is more than {allowed:.1e}, twice eager's error"
    return ComparedValue(name, difference, error, eager_error, allowed, fault)


def largest_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest absolute difference, 0 between equal infinities and NaNs; infinite if one side has others."""
    ours, reference = _widened(ours), _widened(reference)
    same = (ours == reference) | (ours.isnan() & reference.isnan())
    errors = torch.where(same, 0.0, (ours - reference).abs())
    return float(errors.nan_to_num(nan=math.inf, posinf=math.inf).max()) if errors.numel() else 0.0


def cotangent(result: torch.Tensor) -> torch.Tensor:
    """Return a gradient of `result`: 1 of a loss, else the same random numbers in each run."""
    if result.numel() == 1:
        return torch.ones_like(result)
    numbers = torch.randn(result.shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float32)
    return numbers.to(result.device, result.dtype)


def _refuse_without_numbers(values: Values) -> None:
    """Refuse tensors whose elements cannot be read one by one.

    Raises:
        NotComparable: a value is on the device "meta", sparse, or quantised.
    """
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_meta or value.is_quantized or value.layout is not torch.strided:
            kind = "on the device 'meta'" if value.is_meta else "quantised" if value.is_quantized else "sparse"
            hint = "run it on a device with numbers" if value.is_meta else "return a dense tensor of numbers"
            raise NotComparable(f"{name} is {kind}, and has no elements that can be compared", hint=hint)


def _gradients_of(result: object, program: Program, given: Given) -> Iterator[tuple[str, object]]:
    """Run backward from all parts of `result` that require gradients; yield the gradients of inputs and parameters."""
    starts = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
    parameters = program.named_parameters() if isinstance(program, torch.nn.Module) else ()
    named = {name: value for name, value in (*_inputs(given), *parameters) if isinstance(value, torch.Tensor)}
    wanted = {f"gradient of {name}": value for name, value in named.items() if value.requires_grad}
    if starts and wanted:
        gradients = torch.autograd.grad(starts, [*wanted.values()], [*map(cotangent, starts)], allow_unused=True)
        yield from zip(wanted, gradients, strict=True)


def _state(program: Program, given: Given) -> Iterator[tuple[str, object]]:
    """Yield the tensors that a run may change: inputs and buffers."""
    yield from ((name, value) for name, value in _inputs(given) if isinstance(value, torch.Tensor))
    if isinstance(program, torch.nn.Module):
        yield from ((f"buffer {name}", buffer) for name, buffer in program.named_buffers())


def _inputs(given: Given) -> Iterator[tuple[str, object]]:
    yield from _named("input", given[0])
    yield from _named("input", given[1])


def _named(name: str, tree: object) -> Iterator[tuple[str, object]]:
    """Yield the tensors and plain values of a tree with names: `name`, or `name[0]`, `name['key']` in containers."""
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float, complex, str)):
            yield f"{name}{pytree.keystr(path)}", leaf


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf of autograd's graph with the values of `tensor`: only leaves can be deep-copied."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _detached(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_narrow(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return value.dtype not in (torch.float64, torch.complex128)


def _same_numbers(left: object, right: object) -> bool:
    """Return whether two runs of eager gave the same numbers, up to the order of atomic sums."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return True
    return left.shape == right.shape and not _beyond(left, right, *_default_tolerances(left))


def _beyond(ours: torch.Tensor, reference: torch.Tensor, rtol: float, atol: float) -> int:
    """Count the elements that are not within the tolerance."""
    close = torch.isclose(_widened(ours), _widened(reference), rtol=rtol, atol=atol, equal_nan=True)
    return int((~close).sum())


def _default_tolerances(tensor: torch.Tensor) -> tuple[float, float]:
    return torch.testing._comparison.default_tolerances(tensor)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128))
    return tensor.double()


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


__all__ = [
    "Agreement",
    "ComparedRuns",
    "ComparedValue",
    "NotComparable",
    "Tolerance",
    "cotangent",
    "judged",
    "largest_error",
]
