"""Finds the kernel, or the pass, that makes the results of a program differ from eager's.

Input: a program and its inputs; output: a `Bisection`.  The search goes from the kernels back to the passes that
decided them:

1. Run the program as it is compiled, and compare (`inspect/agreement.py`).  If all agrees, the search ends.
2. Compile it anew, and compare each launch with float64 on its own operands (`inspect/accuracy.py`).  The first that is
   wrong was generated wrongly from a right block program.
3. Run all kernels in the evaluator.  If the results agree then, the kernel whose error rounding explains the least is
   wrong.
4. Else the block programs are wrong, and a pass is the cause.  Leave out all optional passes (`stages.OPTIONAL`): if
   the results agree, put them back in order, by halves, until they differ.  The pass that was put back last is the one.
   The kernel is the first whose results differ from the same results without that pass.
5. Else, if the difference is neither rounding nor in PyTorch's trace, each operation's rule is compared with PyTorch's
   kernel on the same operands (`inspect/rules.py`).

Dynamo captures the program once (`regions.py`); its regions are compiled for each run.  From the third step on kernels
stay in the evaluator, so that nothing is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fusion.backend import Backend
from fusion.codegen.targets import builder_for
from fusion.compilation.autograd import aot_backend
from fusion.compilation.region import compile_anew
from fusion.diagnosis.regions import Regions
from fusion.inspect.accuracy import Accuracy, LaunchError, copied, distance, watching
from fusion.inspect.agreement import Agreement, ComparedRuns, Program, Tolerance, Values
from fusion.inspect.report import Report, steps_of
from fusion.inspect.rules import WrongRule, checking
from fusion.inspect.watch import Watch
from fusion.lowering.errors import FusionError, by_place
from fusion.lowering.ir.program import Extern
from fusion.options import Options, options_of, torch_settings
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall
from fusion.schedule.overrides import PRICED, Overrides
from fusion.stages import OPTIONAL

_CHANGED = 0.01
"""A result counts as changed by a pass from this share of the largest change on: later results inherit it."""
EVALUATED = Overrides(evaluated=True)
_SHOWN = 6
"""Values of a program that are shown."""
_ROUNDINGS = 32
"""The number of roundings from which a result counts as changed."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The first launch whose results a pass changed.

    Attributes:
        kernel: its name.
        tensor: the buffer of the program that it wrote.
        origins: the operations that it computes, with the lines of the program.
        error: the change relative to the result without the pass, by norms.
    """

    kernel: str
    tensor: str
    origins: tuple[str, ...]
    error: float

    def __str__(self) -> str:
        head = f"kernel {self.kernel}: {self.tensor} differs by {self.error:.1e} from the result without the pass"
        return "\n".join([head, *(f"    {origin}" for origin in self.origins)])


@dataclass(frozen=True, slots=True)
class Bisection:
    """Holds the result of a search.

    Attributes:
        agreement: the comparison of the program as it is compiled.
        kernel: the first launch whose own error its dtypes do not explain.
        compared: the number of tensors, written by launches, that were compared with float64.
        culprit: the pass without which the results agree, as "stage/pass"; empty if there is none, or if a kernel is
            wrong.
        changed: the first launch whose results the pass changed.
        rule: the first operation that is lowered to other numbers, if neither a kernel nor an optional pass is wrong.
        compilations: how often the program was compiled.
        verdict: the finding, in a sentence.
    """

    agreement: Agreement
    verdict: str
    kernel: LaunchError | None = None
    compared: int = 0
    culprit: str = ""
    changed: Changed | None = None
    rule: WrongRule | None = None
    compilations: int = 1

    @property
    def agrees(self) -> bool:
        """Whether no difference was found."""
        return self.agreement.agrees

    def __str__(self) -> str:
        values = self.agreement.values if self.agrees else self.agreement.differing
        more = len(values) - _SHOWN
        lines = [*map(str, values[:_SHOWN]), *([f"… and {more} others"] if more > 0 else []), self.verdict]
        lines += [str(part) for part in (self.kernel, self.changed, self.rule) if part is not None]
        return "\n".join([*lines, *([f"note: {self.agreement.note}"] if self.agreement.note else [])])


def bisect(
    program: Callable[..., object],
    /,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    against: str = "eager",
    **settings: object,
) -> Callable[..., Bisection]:
    """Find the kernel or pass that makes results differ from eager's: `bisect(model)(*args, **kwargs)`.

    The program is compiled a dozen times at most, and run on copies; gradients are compared if results require them.

    Args:
        program, rtol, atol, against, settings: as for `verify`.

    Returns:
        A function that takes the arguments of `program` and returns a `Bisection`: whether results differ
            (`agreement`), the first kernel that is wrong by itself (`kernel`), else the pass without which results
            agree (`culprit`) with the first kernel that it changes (`changed`).

    Raises:
        NotComparable: the program draws random numbers, or there is no float64 run to compare with.
        FusionError: the program cannot be compiled without some pass.
        TypeError: `program` cannot be called, or a setting is unknown or has the wrong type.
        ValueError: unknown mode, option or value of an option; a tolerance that is negative.

    >>> import torch
    >>> result = bisect(lambda x: torch.softmax(x, -1))(torch.randn(4, 100))
    >>> result.agrees, result.kernel, result.culprit
    (True, None, '')
    """
    options, tolerance = options_of("bisect", program, settings), Tolerance(rtol, atol, against)

    def run(*args: object, **kwargs: object) -> Bisection:
        return _Search(ComparedRuns(program, args, kwargs, tolerance), options, torch_settings(settings)).result()

    return run


def _of_small_errors(whole: Agreement, launches: Sequence[LaunchError]) -> Bisection:
    """Name the most suspicious kernel, as the results agree once all kernels run in the evaluator."""
    if not launches:
        return Bisection(whole, "the results agree once kernels run in the evaluator, but no kernel was launched")
    verdict = (
        "the results agree once kernels run in the evaluator; this kernel's error is the least explained by rounding:"
    )
    return Bisection(whole, verdict, Accuracy(tuple(launches)).worst[0])


@dataclass(slots=True)
class _Search:
    runs: ComparedRuns
    options: Options
    settings: Mapping[str, object]
    compilations: int = 0
    reports: Sequence[Report] = ()
    values: Values = field(default_factory=dict)
    again: Callable[[], Values] | None = None  # runs the program, whose regions are captured once
    regions: Regions = field(init=False)
    known: set[str] = field(default_factory=set)  # why regions run eagerly, with all passes

    def result(self) -> Bisection:
        whole = self._run(self.options).with_reports(self.reports)
        if whole.agrees:
            return Bisection(whole, "all results agree")
        fresh = replace(self.options, graph_cache=False, cudagraphs=False)
        launches: list[LaunchError] = []
        anew = self._run(fresh, watch=watching(launches.append))
        wrong = next((launch for launch in launches if not launch.is_right), None)
        if wrong is not None:
            bisection = Bisection(whole, "this kernel computes other numbers than its block program:", wrong)
        elif anew.agrees:
            bisection = Bisection(whole, self._kept())
        elif self._run(fresh, EVALUATED).agrees:
            bisection = _of_small_errors(whole, launches)
        else:
            bisection = self._of_passes(whole, fresh)
        return replace(bisection, compared=len(launches), compilations=self.compilations)

    def _kept(self) -> str:
        way = "recorded as a CUDA graph" if self.options.cudagraphs else "taken from the cache (`fusion cache --clear`)"
        return f"no kernel is wrong, and compiled anew the results agree: they differ where the graphs are {way}"

    def _of_passes(self, whole: Agreement, fresh: Options) -> Bisection:
        """Search among the passes; the last compilation had all of them."""
        ran = {
            f"{each.stage}/{each.name}"
            for report in self.reports
            for each in report.passes
            if each.changed is not False
        }
        candidates = [name for name in OPTIONAL if name in ran]

        def differs(kept: int, watch: Watch | None = None) -> bool:
            without = frozenset(candidates[kept:])
            return not self._run(fresh, replace(EVALUATED, without=without), watch).agrees

        if differs(0):
            return self._without_passes(whole, fresh)
        place = first_failing(len(candidates), differs)
        recorded = _Recorded()
        differs(place - 1, recorded)
        compared = _ComparedTo(recorded)
        differs(place, compared)
        culprit = candidates[place - 1]
        alone = self._run(fresh, replace(EVALUATED, without=frozenset([culprit]))).agrees
        verdict = f"no kernel is wrong by itself; the pass {culprit} makes the results differ: without it they agree"
        if not alone:
            verdict = (
                f"no kernel is wrong by itself; {culprit} is the first pass that makes the results differ, of several"
            )
        return Bisection(whole, verdict, culprit=culprit, changed=compared.first())

    def _without_passes(self, whole: Agreement, fresh: Options) -> Bisection:
        """Search the needed passes and the kernels, if no optional pass makes the results differ."""
        head = "no kernel is wrong, and the results differ without any optional pass: "
        if self.runs.agreement(self.values, Tolerance()).agrees:
            return Bisection(whole, f"{head}it is rounding, as the error against float64 is at most twice eager's")
        if not fresh.exact and self._run(replace(fresh, numerics="strict")).agrees:
            return Bisection(whole, f"{head}it is rounding, as with options={{'numerics': 'strict'}} they agree")
        traced = self.runs.run(lambda program: _compiled_by("aot_eager", program, self.settings))
        if not self.runs.agreement(traced).agrees:
            return Bisection(whole, f"{head}PyTorch's own trace differs from eager (backend='aot_eager')")
        rules = self._wrong_rules(fresh)
        if rules:
            return Bisection(whole, f"{head}the rule of this operation is wrong:", rule=rules[0])
        return Bisection(whole, f"{head}a pass that is needed is wrong, as the rules of all operations are right")

    def _wrong_rules(self, options: Options) -> list[WrongRule]:
        """Run the graphs with PyTorch's operations, and check the rule of each on the same operands."""
        wrong: list[WrongRule] = []
        backend = aot_backend(
            lambda graph, label: checking(graph, wrong.append),
            lambda device: builder_for(device.type, options.target, options.current_numerics).target.capabilities,
            options.workspace,
            exact=options.exact,
            overrides=Overrides(without=frozenset(OPTIONAL)),
        )
        self.runs.run(lambda program: compile_anew(program, backend, **self.settings))
        return wrong

    def _run(self, options: Options, overrides: Overrides = PRICED, watch: Watch | None = None) -> Agreement:
        """Compile the program anew, run it, and compare."""
        self.compilations += 1
        backend = Backend(options, watch, overrides)
        if self.again is None:
            self.regions = Regions(backend)
            self.again = self.runs.repeated(lambda program: compile_anew(program, self.regions, **self.settings))
        self.regions.use(backend)
        self.values = self.again()
        self.reports = tuple(backend.reports)
        failed = {report.failure for report in self.reports if report.failure}
        if overrides.without and failed - self.known:
            raise FusionError(f"the program cannot be compiled without some passes: {'; '.join(failed)}")
        self.known |= failed
        return self.runs.agreement(self.values)


def _compiled_by(backend: str, program: Program, settings: Mapping[str, object]) -> Program:
    return torch.compile(program, backend=backend, **settings)  # type: ignore[call-overload, no-any-return]  # PyTorch tests the settings


def first_failing(count: int, fails: Callable[[int], bool]) -> int:
    """Return a number n ≤ `count` with which `fails`, and not with n − 1; it fails with `count`, and not with 0.

    >>> first_failing(100, lambda n: n >= 37)
    37
    """
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return bad


# Results of launches ------------------------------------------------------------------------------------------------


class _Written(Watch):
    """A `Watch` of the tensors that each launch writes, under names that another compilation has too."""

    def __init__(self) -> None:
        self._graphs: dict[int, int] = {}  # id of a step → the number of its graph
        self._held: list[Schedule] = []  # the steps outlive their ids
        self._runs: dict[tuple[int, str], int] = {}

    def __call__(self, step: KernelCall | Extern, run: Callable[..., object]) -> Callable[..., object]:
        if not isinstance(step, KernelCall):
            return run

        def launched(*args: object) -> None:
            run(*args)
            for name, param, value in zip(step.buffers, step.kernel.params, args, strict=False):
                if param.written and isinstance(value, torch.Tensor):
                    key = self._graphs.get(id(step), -1), name
                    self._runs[key] = self._runs.get(key, -1) + 1
                    self.wrote(step, (*key, self._runs[key]), value)

        return launched

    def compiled(self, report: Report, schedule: Schedule) -> None:
        """Number a graph."""
        for _, step, _ in steps_of(schedule):
            self._graphs[id(step)] = len(self._held)
        self._held.append(schedule)

    def wrote(self, step: KernelCall, key: tuple[int, str, int], value: torch.Tensor) -> None:
        """Record a tensor after a launch: its graph, its name, and how often it was written before."""
        raise NotImplementedError


class _Recorded(_Written):
    """Copies the results of all launches."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[int, str, int], torch.Tensor] = {}

    def wrote(self, step: KernelCall, key: tuple[int, str, int], value: torch.Tensor) -> None:
        self.values[key] = copied(value, value.dtype)


@dataclass
class _ComparedTo(_Written):
    """Compares the results of all launches with recorded ones of the same names."""

    recorded: _Recorded
    changes: list[tuple[Changed, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def wrote(self, step: KernelCall, key: tuple[int, str, int], value: torch.Tensor) -> None:
        before = self.recorded.values.get(key)
        if before is None or (before.shape, before.dtype) != (value.shape, value.dtype):
            return
        exact = before.double() if before.is_floating_point() else before
        least = _ROUNDINGS * torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        error = distance(value, exact)[0]
        self.changes.append((Changed(step.kernel.name, key[1], by_place(step.origins), error), least))

    def first(self) -> Changed | None:
        """Return the first launch with a change that rounding does not explain, and that is not small beside others."""
        largest = max((change.error for change, _ in self.changes), default=0.0)
        clear = (change for change, least in self.changes if change.error > max(least, _CHANGED * largest))
        by_size = sorted((change for change, _ in self.changes if change.error), key=lambda change: -change.error)
        return next(clear, by_size[0] if by_size else None)


__all__ = ["Bisection", "Changed", "bisect", "first_failing"]
