"""Certifies a compiled program: `fusion.explain(…, verify=True)`.

Input: a program and the inputs of its user; output: a `Certificate` with three kinds of findings.

1. Each launch on the user's inputs: its error against float64 arithmetic on its own operands, and the contribution of
   that error to the results.  The contribution is measured: the program runs once more with the exact results of this
   launch, rounded to their dtypes, in place of the launch's results.
2. Each kernel as it was built, on hostile inputs (`adversarial.py`), against the evaluator.
3. Each rewrite on hostile inputs (`rewrites.py`), in the evaluator: the form before against the form after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from fusion.backend import Backend
from fusion.codegen.tuning.inputs import open_bounds
from fusion.compilation.region import compile_anew
from fusion.diagnosis.adversarial import hostile
from fusion.diagnosis.rewrites import Rewrites
from fusion.inspect.accuracy import UNWRITTEN, LaunchError, compared, copied, distance
from fusion.inspect.agreement import ComparedRuns, Program, Values
from fusion.inspect.certificate import GENERATED, Certificate, Certified, Checked, Fault
from fusion.lowering.checks.checked import has_checks
from fusion.lowering.errors import CheckFailed, VerifyError, by_place
from fusion.lowering.interpret import run_kernel
from fusion.lowering.interpret.evaluate import flat_view
from fusion.lowering.ir.kernel import Kernel, only_stored
from fusion.lowering.ir.program import Extern
from fusion.options import Options
from fusion.schedule.kernels import KernelCall

_LARGEST = 1 << 22
"""Elements of the tensors of a launch that is checked on hostile inputs."""


def certify(
    program: Program,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Options,
    settings: Mapping[str, object],
) -> Certificate:
    """Check a program on its inputs; it is compiled anew, and runs on copies.

    Random results are not compared with eager, which draws other numbers: launches and rewrites are checked, which draw
    the same ones from the same seeds.
    """
    runs, watch = ComparedRuns(program, args, kwargs, random=True), _Certifying()
    backend = Backend(replace(options, graph_cache=False, cudagraphs=False), watch)
    again = runs.repeated(lambda copied: compile_anew(copied, backend, **settings))
    errors: list[tuple[int, LaunchError]] = []
    watch.errors = errors
    values = again()
    agreement = runs.agreement(values).with_reports(backend.reports)
    watch.errors = None
    return Certificate(agreement, tuple(_certified(watch, again, errors)), (*watch.built, *watch.checked()))


def _certified(
    watch: _Certifying, again: Callable[[], Values], errors: Sequence[tuple[int, LaunchError]]
) -> Iterator[Certified]:
    """Run the program once for each launch that is not exact, with the launch's exact results."""
    watch.restart()
    plain = again()
    known: dict[int, tuple[float, str]] = {}
    for number, error in errors:
        if number not in known:
            watch.restart(number)
            known[number] = _change(plain, again()) if error.error else (0.0, "")
        yield Certified(error, *known[number])


def _change(plain: Values, other: Values) -> tuple[float, str]:
    """Return the largest relative change of a value, and its name."""
    changes = [
        (distance(value, _wide(other[name]))[0], name)
        for name, value in plain.items()
        if isinstance(value, torch.Tensor) and isinstance(other.get(name), torch.Tensor) and not value.is_complex()
    ]
    largest = max(changes, default=(0.0, ""))
    return largest if largest[0] else (0.0, "")


def _wide(value: object) -> torch.Tensor:
    tensor = cast("torch.Tensor", value)
    return tensor.double() if tensor.is_floating_point() else tensor


@dataclass
class _Certifying(Rewrites):
    """Observes the passes, and the launches of each run, which are numbered from 0.

    Attributes:
        errors: collects (number of the launch, error of a tensor); None if launches are not compared.
        built: the kernels that were checked on hostile inputs.
        exact: the launch that is replaced by exact arithmetic.
    """

    errors: list[tuple[int, LaunchError]] | None = None
    built: list[Checked] = field(default_factory=list)
    exact: int | None = None
    _number: int = -1
    _seen: set[Kernel] = field(default_factory=set)

    def restart(self, exact: int | None = None) -> None:
        """Begin another run."""
        self.exact, self._number = exact, -1

    def __call__(self, step: KernelCall | Extern, run: Callable[..., object]) -> Callable[..., object]:
        """Return a launcher that also compares the kernel with float64, or replaces its results by exact ones."""
        if not isinstance(step, KernelCall):
            return run

        def launched(*args: object) -> None:
            self._number += 1
            if self.errors is not None:
                self._check_built(step, run, args)
                self.errors += [(self._number, error) for error in compared(step, run, args)]
            elif self._number == self.exact:
                _launch_exactly(step.kernel, args)
            else:
                run(*args)

        return launched

    def _check_built(self, call: KernelCall, run: Callable[..., object], args: Sequence[object]) -> None:
        """Launch a kernel on hostile variants of its operands, the first time it is met."""
        if call.kernel in self._seen:
            return
        self._seen.add(call.kernel)
        tensors = cast("Sequence[torch.Tensor]", args[: len(call.kernel.params)])
        origins = by_place(call.origins)
        if any(tensor.is_cuda for tensor in tensors) and has_checks(call.kernel):
            reason = f"{call.kernel.name} checks positions, and a failed check ends a process on a GPU"
            self.built.append(Checked(GENERATED, origins, reason=reason))
        elif sum(tensor.numel() for tensor in tensors) > _LARGEST:
            self.built.append(Checked(GENERATED, origins, reason=f"the tensors of {call.kernel.name} are too large"))
        else:
            self.built.append(_of_built(call, run, tensors, args[len(tensors) :], origins))


def _of_built(
    call: KernelCall,
    run: Callable[..., object],
    tensors: Sequence[torch.Tensor],
    sizes: Sequence[object],
    origins: tuple[str, ...],
) -> Checked:
    """Compare a built kernel with the evaluator on hostile inputs."""
    kernel, unread = call.kernel, only_stored(call.kernel)
    names = [param.name for param in kernel.params]
    read = [k for k, name in enumerate(names) if name not in unread]
    numbers = {size: int(cast("int", number)) for size, number in zip(kernel.sizes, sizes, strict=False)}
    bounds = open_bounds(kernel, numbers)
    tried: list[str] = []
    faults: list[Fault] = []
    for kind, changed in hostile([tensors[k] for k in read]):
        held = [copied(tensor, tensor.dtype) for tensor in tensors]
        for k, tensor in zip(read, changed, strict=True):
            held[k] = tensor
        for name, number in bounds.items():
            held[names.index(name)].fill_(number)
        try:
            errors = list(compared(call, run, [*held, *sizes]))
        except (CheckFailed, VerifyError):
            continue  # the kernel refuses these, as its block program does
        tried.append(kind)
        faults += [
            Fault(kind, error.tensor, f"error {error.error:.1e} against float64, by its dtypes {error.rounding:.1e}")
            for error in errors
            if not error.is_right
        ]
    return Checked(GENERATED, origins, tuple(tried), tuple(faults))


def _launch_exactly(kernel: Kernel, args: Sequence[object]) -> None:
    """Compute a launch in float64, and store its results rounded to their dtypes."""
    count = len(kernel.params)
    tensors, sizes = cast("Sequence[torch.Tensor]", args[:count]), cast("Sequence[int]", args[count:])
    exact = [copied(each, torch.float64 if each.is_floating_point() else each.dtype) for each in tensors]
    unread = only_stored(kernel)
    for param, tensor in zip(kernel.params, exact, strict=True):
        if param.name in unread and tensor.is_floating_point():
            flat_view(tensor).fill_(UNWRITTEN)
    run_kernel(kernel, exact, sizes, exact=False)
    for param, tensor, other in zip(kernel.params, tensors, exact, strict=True):
        if param.written:
            held, ours = flat_view(other), flat_view(tensor)
            stored = held != UNWRITTEN
            ours[stored] = held[stored].to(ours.dtype)


__all__ = ["certify"]
