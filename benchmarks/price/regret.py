"""Regret: the time lost against the best alternative that was on the table, found by building the alternatives.

Of a program: PyTorch's own operations behind the same guards, no two operations in one kernel, the library for every
product, generated kernels for every product, products in parts, and attention by the other side; each is built by
imposing it on the scheduler.  Of a kernel: the configurations of all its forms that are predicted to be the fastest.
All take turns on the same inputs; an alternative with wrong results does not count.  Dynamo checks its guards before
each call, 10 to 15 µs that no decision of a compiler avoids: `benchmarks cpu` compares with eager without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

import fusion
from benchmarks.clocks import seconds_in_turn
from benchmarks.harness import Refused, distance
from benchmarks.price.measured import Call, Compiler, Subject
from benchmarks.price.turns import alone, median_time_alone, repeated
from fusion.codegen.target import KernelCandidate, Launcher, Target
from fusion.codegen.tuning.check import wrong_tensor
from fusion.codegen.tuning.inputs import clone
from fusion.inspect.measurement import Measurement, Restore
from fusion.inspect.report import Report
from fusion.lowering.errors import FusionError
from fusion.lowering.ir.kernel import Kernel
from fusion.schedule.overrides import LIBRARY, ONE_KERNEL, OPERANDS_STORED, PRICED, Overrides

CHOSEN = "chosen"
CONFIGURATIONS = 5
"""The configurations of a kernel that are tried beside the default one, the best predicted first; twice as many of one
with several forms."""
WRONG = 2e-2
"""The distance from eager's results, relative to their norm, above which an alternative does not count."""
CLOSE = 2.0
"""Alternatives that take longer than this times the fastest in the first rounds are not timed again."""
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "linear", "matmul"})


@dataclass(frozen=True, slots=True)
class Regret:
    """The microseconds of a program, or of one of its kernels, as chosen and in each alternative."""

    name: str
    times: Mapping[str, float]

    @property
    def best(self) -> str:
        """The fastest alternative, or what was chosen."""
        return min(self.times, key=lambda name: self.times[name])

    @property
    def regret(self) -> float:
        """The time lost, relative to the best."""
        return self.times[CHOSEN] / self.times[self.best] - 1


def regret_of(subject: Subject, device: str, rounds: int) -> Regret:
    """Build and time the alternatives of a program.

    Raises:
        Refused: a region runs eagerly.
    """
    torch._dynamo.reset()
    prepared = subject.prepare(device)
    eager = prepared(lambda program: program)
    with _Operations() as operations:
        wanted = eager()
    chosen, reports = _built(prepared, PRICED)
    unfused = prepared(lambda program: torch.compile(program, backend="eager", dynamic=False))
    with _unlimited():
        unfused()
    calls: dict[str, Call] = {CHOSEN: chosen, "eager": unfused}
    known = {_signature(reports)}
    for name, overrides in _alternatives(reports, operations.names):
        call, others = _built(prepared, overrides)
        if _signature(others) not in known and (operations.random or _agree(call(), wanted)):
            calls[name] = call
        known.add(_signature(others))
    return Regret(subject.name, _times(calls, device, rounds))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    """Notes the names of the operations that run, and whether one draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        self.names: set[str] = set()
        self.random = False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.names.add(func.overloadpacket.__name__)
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _built(
    prepared: Callable[[Compiler], Call], overrides: Overrides, watch: Measurement | None = None
) -> tuple[Call, Sequence[Report]]:
    """Compile a program with decisions imposed, and call it once."""
    options = fusion.Options.read(options={"graph_cache": False})
    backend = fusion.Backend(options, watch, overrides)
    call = prepared(lambda program: torch.compile(program, backend=backend, dynamic=False))
    with warnings.catch_warnings(), _unlimited():
        warnings.simplefilter("error", fusion.FusionWarning)
        call()
    for report in backend.reports:
        if report.failure:
            raise Refused(f"Fusion fell back to eager: {report.failure}")
    return call, tuple(backend.reports)


def _unlimited() -> AbstractContextManager[None]:
    """Let Dynamo compile the same program as often as it has alternatives."""
    return torch._dynamo.config.patch(recompile_limit=1 << 10, accumulated_recompile_limit=1 << 10)  # type: ignore[no-any-return]


def _alternatives(reports: Sequence[Report], operations: set[str]) -> Iterator[tuple[str, Overrides]]:
    """Yield the alternatives of a program that consists of `operations`, given the reports of what was chosen."""
    if any(report.operations > len(report.kernels) for report in reports):
        yield "unfused", Overrides(fused=False)
    trials = {trial.name for report in reports for tuning in report.tunings for trial in tuning.trials}
    if operations & PRODUCTS:
        yield "products by the library", Overrides(products=LIBRARY)
        yield "products generated", Overrides(products=ONE_KERNEL)
        for name in sorted(trial for trial in trials if trial.startswith("in ")):
            yield f"products {name}", Overrides(products=name)
        if OPERANDS_STORED in trials:
            yield OPERANDS_STORED, Overrides(products=OPERANDS_STORED)
    if any("scaled_dot_product" in name for name in operations):
        yield "attention generated", Overrides(attention=True)
        yield "attention by the library", Overrides(attention=False)


def _signature(reports: Sequence[Report]) -> tuple[object, ...]:
    """Return the launches and calls of all graphs: equal ones are no alternatives."""
    return tuple((*(k.source for k in report.kernels), *(e.name for e in report.externs)) for report in reports)


def _agree(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return whether results are those of eager, but for rounding."""
    pairs = list(zip(results, wanted, strict=True))
    return all(
        distance(ours, theirs.double()) <= WRONG if ours.is_floating_point() else torch.equal(ours, theirs)
        for ours, theirs in pairs
    )


def _times(calls: Mapping[str, Call], device: str, rounds: int) -> dict[str, float]:
    """Return the median microseconds of each call; those of few rounds where it is far from the fastest."""
    with alone():
        first = {name: min(values) for name, values in seconds_in_turn(calls, device, 2).items()}
    fastest = min(first.values())
    close = {name: call for name, call in calls.items() if name == CHOSEN or first[name] <= CLOSE * fastest}
    medians: list[dict[str, float]] = []
    for _ in repeated():
        samples = seconds_in_turn(close, device, rounds)
        medians.append({name: median(values) for name, values in samples.items()})
    return {name: (min(each[name] for each in medians) if name in close else first[name]) * 1e6 for name in calls}


# Kernels --------------------------------------------------------------------------------------------------------------


def configurations_of(subject: Subject, device: str, target: Target) -> list[Regret]:
    """Build and time the configurations of the kernels of a program, on the tensors that they get in a call."""
    torch._dynamo.reset()
    watch = Configurations(target, subject.name)
    _built(subject.prepare(device), PRICED, watch)
    return watch.regrets


class Configurations(Measurement):
    """Measures the launches of a program, each kernel also in other configurations."""

    def __init__(self, target: Target, program: str) -> None:
        super().__init__(median_time_alone)
        self.regrets: list[Regret] = []
        self._target, self._program = target, program
        self._seen: set[Kernel] = set()

    def launch_time(
        self, kernel: Kernel, run: Callable[[], object], operands: Sequence[Tensor], restore: Restore
    ) -> float:
        chosen = super().launch_time(kernel, run, operands, restore)
        if kernel.sizes or kernel in self._seen:
            return chosen
        self._seen.add(kernel)
        count = CONFIGURATIONS * (2 if len(self._target.forms(kernel)) > 1 else 1)
        ways = self._target.alternatives(kernel)[1 : 1 + count]
        with ThreadPoolExecutor(max(1, len(ways))) as pool:
            built = list(pool.map(partial(self._build, kernel), ways))
        if restore is not None:
            restore()
        run()
        written = [tensor for param, tensor in zip(kernel.params, operands, strict=True) if param.written]
        wanted = [clone(tensor) for tensor in written]
        times = {CHOSEN: chosen}
        for way, launch in zip(ways, built, strict=True):
            if launch is not None and _is_right(partial(launch, *operands), restore, written, wanted):
                times[way.name] = super().launch_time(kernel, partial(launch, *operands), operands, restore)
            for tensor, result in zip(written, wanted, strict=True):
                tensor.copy_(result)
        if len(times) > 1:
            self.regrets.append(Regret(f"{self._program} / {kernel.name}", times))
        return chosen

    def _build(self, kernel: Kernel, way: KernelCandidate) -> Launcher | None:
        with suppress(FusionError):
            return self._target.build(kernel, way.source)
        return None


def _is_right(run: Callable[[], object], restore: Restore, written: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return whether a launch runs, and writes the wanted results."""
    if restore is not None:
        restore()
    try:
        run()
        if written and written[0].is_cuda:
            torch.cuda.synchronize()
    except FusionError:  # it needs more shared memory than there is
        return False
    return all(wrong_tensor("", ours, theirs) is None for ours, theirs in zip(written, wanted, strict=True))
