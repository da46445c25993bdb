"""Checks each rewrite of a program where it would break.

Input: the passes of a compilation, as they run; output: a `Checked` for each part of a program that a pass changed, and
for each kernel that computes it.  Both forms of the part are evaluated on hostile inputs (`adversarial.py`): in
float64, where they must agree, and in their own dtypes, where the new form may not be much farther from float64 than
the old one.  Nothing is generated or built.  Equal parts, such as layers of a model, are checked once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import sympy
import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion.compilation.graphs import size_hints
from fusion.diagnosis.adversarial import hostile
from fusion.diagnosis.pass_changes import RewrittenPart, changed_parts, parts_of
from fusion.dumps.inputs import Draw, attempts
from fusion.inspect.accuracy import copied, distance, is_close
from fusion.inspect.certificate import Checked, Fault
from fusion.inspect.named_parts import graph_parts
from fusion.inspect.watch import Watch
from fusion.lowering.errors import CheckFailed, FusionError, Unsupported, VerifyError, brief, by_place
from fusion.lowering.interpret import run_kernel, run_program
from fusion.lowering.interpret.evaluate import flat_view
from fusion.lowering.ir.chunks import BETA, POINTS, START
from fusion.lowering.ir.program import Buffer, Program
from fusion.lowering.ir.sizes import size_value
from fusion.lowering.lower import lower
from fusion.lowering.printer import format_program
from fusion.runner.contexts import Deriving, Joint, Planned, Scheduled, Scheduling
from fusion.schedule.kernels import KernelCall
from fusion.stages import PREVIEWS

_SAME = 1e-6
"""The largest difference of two forms of a part in float64: sums in another order, of numbers that nearly cancel."""
_SHAKEN = 1e-9
"""Two forms may differ by as much as a change of the inputs by this share makes the result differ."""
_LARGEST = 1 << 24
"""Elements of the tensors of a part; a larger one is not evaluated."""

_WORK = 1600
"""Nodes that are evaluated in one form of a part, over all kinds of inputs: a large part gets the first kinds alone."""

OTHER_NUMBERS = ("share_seeds",)
"""Passes that change numbers on purpose: a call with a seed draws other random numbers than one without."""

LEFT_OPEN = {
    "launches/shift_means": ("infinity", "masked out"),
    "joint/reassociate": ("infinity", "masked out"),
    "program/select_terms": ("infinity", "masked out", "false"),  # of a mean over nothing
}
"""Rewrites → the inputs on which they may change results: the mean of infinities, computed with a variance, is NaN, a
sum in another order has its NaNs elsewhere, and the only term of a sum that is not zero, times an infinity, is an
infinity where zeros times it are NaN (docs/numerics.md).
"""

_OTHER = 77
"""The content of a written tensor before a launch."""

Results = list[torch.Tensor]
Form = Callable[[Sequence[torch.Tensor], bool], Results]
"""Evaluates a form of a part on inputs, exactly in its dtypes (True) or in float64."""


@dataclass
class Rewrites(Watch):
    """A `Watch` of the passes over programs and launches; `checked` evaluates their changes."""

    _before: dict[str, Program] = field(default_factory=dict)  # by stage
    _graphs: dict[str, Mapping[str, object]] = field(default_factory=dict)  # the nodes that were lowered, by stage
    _kernels: set[object] = field(default_factory=set)
    _open: list[Callable[[], Checked]] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)

    def passed(self, stage: str, name: str, subject: object, context: object) -> None:
        """Cut out the nodes that a pass changed."""
        if isinstance(subject, (Joint, fx.GraphModule)) and isinstance(context, Deriving):
            if name not in OTHER_NUMBERS:
                self._derived(stage, name, subject.graph if isinstance(subject, Joint) else subject)
            return
        if not isinstance(context, Scheduling) or stage in PREVIEWS:
            return
        sizes = {START: 0, BETA: 0, POINTS: 1, **(context.hints or {})}
        if isinstance(subject, Scheduled):
            before = self._before.get(stage)
            if name and before is not None and before is not subject.program:
                self._rewritten(f"{stage}/{name}", before, subject.program, sizes)
            self._before[stage] = subject.program
        elif isinstance(subject, Planned) and name:
            for step in subject.steps:
                if isinstance(step, KernelCall) and step.kernel not in self._kernels:
                    self._kernels.add(step.kernel)
                    self._add_kernel(f"{stage}/{name}", step, subject.program, sizes)

    def _derived(self, stage: str, name: str, graph: fx.GraphModule) -> None:
        """Cut out the nodes that a pass over an fx graph changed."""
        if name and graph_parts(graph) == self._graphs.get(stage):
            return
        with unset_fake_temporarily(), no_python_dispatcher():
            program = lower(graph, contractions=())
        if name and (before := self._before.get(stage)) is not None:
            self._rewritten(f"{stage}/{name}", before, program, size_hints(graph) or {})
        self._before[stage], self._graphs[stage] = program, graph_parts(graph)

    def checked(self) -> tuple[Checked, ...]:
        """Evaluate all parts so far."""
        return tuple(check() for check in self._open)

    def _rewritten(self, name: str, before: Program, after: Program, sizes: Mapping[sympy.Symbol, int]) -> None:
        for part in changed_parts(before, after):
            if isinstance(part, Unsupported):
                self._add(name, part.message, partial(Checked, name, (), reason=part.message))
                continue
            origins = by_place(dict.fromkeys([*part.before.origins.values(), *part.after.origins.values()]))
            text = _canonical(part.before) + _canonical(part.after)
            self._add(name, text, partial(_of_part, name, origins, part, sizes))

    def _add_kernel(self, name: str, call: KernelCall, program: Program, sizes: Mapping[sympy.Symbol, int]) -> None:
        check = partial(_of_kernel, name, by_place(call.origins), call, program, sizes)
        self._add(name, str(len(self._kernels)), check)

    def _add(self, name: str, text: str, check: Callable[[], Checked]) -> None:
        if (key := f"{name} {text}") not in self._known:
            self._known.add(key)
            self._open.append(check)


def _canonical(program: Program) -> str:
    """Return the text of a program with its tensors numbered, so that equal parts have equal texts."""
    numbers = {name: f"%{k}" for k, name in enumerate(program.buffers)}
    lines = (line.partition("  # ")[0] for line in format_program(program).splitlines())
    return re.sub(r"[A-Za-z_]\w*", lambda word: numbers.get(word[0], word[0]), "\n".join(lines))


def _of_part(name: str, origins: tuple[str, ...], part: RewrittenPart, sizes: Mapping[sympy.Symbol, int]) -> Checked:
    """Check a part of a program."""
    forms = (_form(part.before, sizes), _form(part.after, sizes))
    return _checked(name, origins, part.before, sizes, *forms, part.results)


def _form(program: Program, sizes: Mapping[sympy.Symbol, int]) -> Form:
    def run(tensors: Sequence[torch.Tensor], exact: bool) -> Results:
        given = iter(tensors)
        inputs = [sizes[entry] if isinstance(entry, sympy.Symbol) else next(given) for entry in program.inputs]
        results = run_program(program, inputs, exact=exact)
        return [result for result in results if isinstance(result, torch.Tensor)]

    return run


def _of_kernel(
    name: str, origins: tuple[str, ...], call: KernelCall, program: Program, sizes: Mapping[sympy.Symbol, int]
) -> Checked:
    """Check that a kernel computes the values of its nodes: its loops, running values and merges are derived."""
    last = {operand: result for result, operand in call.over.items()}  # an overwritten operand cannot be compared
    results = [*(name for name in call.written if name not in last), *last.values()]
    try:
        if unknown := [buffer for buffer in (*call.buffers, *results) if buffer not in program.buffers]:
            raise Unsupported(f"{unknown[0]} is no tensor of the program")
        read = [buffer for buffer in call.buffers if buffer not in call.written]
        part, operands = parts_of(program, read, results, read)
    except Unsupported as reason:
        return Checked(name, origins, reason=reason.message)
    nodes, operands_of = _form(part, sizes), _form(operands, sizes)

    def launched(tensors: Sequence[torch.Tensor], exact: bool) -> Results:
        given = [copied(tensor, tensor.dtype) for tensor in tensors]  # nodes that update a tensor do so in place
        held = dict(zip(read, operands_of(given, exact), strict=True))
        held = {each: copied(value, value.dtype) for each, value in held.items()}
        held |= {each: _empty(program.buffers[each], sizes, exact) for each in call.written}
        numbers = [size_value(size, sizes) for size in call.kernel.sizes]
        run_kernel(call.kernel, [held[each] for each in call.buffers], numbers, exact=exact)
        return [held[call.over.get(each, each)] for each in results]

    return _checked(name, origins, part, sizes, nodes, launched, tuple(results))


def _checked(
    name: str,
    origins: tuple[str, ...],
    program: Program,
    sizes: Mapping[sympy.Symbol, int],
    before: Form,
    after: Form,
    results: Sequence[str],
) -> Checked:
    """Evaluate both forms on hostile inputs."""
    try:
        drawn = _drawn(program, sizes, before)
    except (FusionError, RuntimeError, KeyError) as reason:
        return Checked(name, origins, reason=f"{type(reason).__name__}: {reason}")
    tried: list[str] = []
    faults: list[Fault] = []
    most = max(2, _WORK // max(1, len(program.nodes)))
    for kind, tensors in islice(hostile(drawn), most):
        if any(word in kind for word in LEFT_OPEN.get(name, ())):
            continue
        try:
            old = _both(before, tensors)
        except (CheckFailed, VerifyError):
            continue  # the program itself refuses these
        tried.append(kind)
        try:
            new = _both(after, tensors)
        except FusionError as failure:
            faults.append(Fault(kind, results[0], f"it fails: {failure}"))
            continue
        except RuntimeError as failure:  # of a call of PyTorch, in other dtypes than its own
            return Checked(name, origins, reason=f"it cannot be evaluated: {brief(failure)}")
        for k, values in enumerate(zip(*old, *new, strict=True)):
            noise = partial(_noise, before, tensors, k, values[1])
            if what := _difference(*values, noise):
                faults.append(Fault(kind, results[k], what))
    return Checked(name, origins, tuple(tried), tuple(faults))


def _both(form: Form, tensors: Sequence[torch.Tensor]) -> tuple[Results, Results]:
    """Return the results in the dtypes of the program and in float64; a run may change its inputs."""
    rounded, exact = ([copied(tensor, tensor.dtype) for tensor in tensors] for _ in range(2))
    return form(rounded, True), form(exact, False)


def _difference(
    rounded: torch.Tensor, exact: torch.Tensor, ours: torch.Tensor, wide: torch.Tensor, noise: Callable[[], float]
) -> str:
    """Return how a result differs between the two forms; empty if rounding explains it."""
    error = distance(wide, exact)[0]
    if math.isinf(error):
        return "NaN or an infinity is at another place in float64"
    if not exact.is_floating_point():
        return f"{error:.1%} of the elements differ" if error else ""
    if error > _SAME and _largest(wide - exact) > noise():
        return f"differs by {error:.1e} in float64"
    if rounded.dtype is torch.float64 or not torch.isfinite(rounded).eq(torch.isfinite(exact)).all():
        return ""  # nothing is more exact, or the dtypes do not hold the numbers
    is_right, error, explained = is_close(ours.to(rounded.dtype), rounded, exact)
    return "" if is_right else f"error {error:.1e} against float64, before it {explained:.1e}"


def _noise(before: Form, tensors: Sequence[torch.Tensor], place: int, exact: torch.Tensor) -> float:
    """Return by how much a result changes with its inputs: the sum of numbers without their mean is 0 but for rounding,
    in either form.
    """
    generator = torch.Generator(exact.device).manual_seed(0)
    roundings = [torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.is_floating_point()]
    change = before([_shaken(tensor, generator) for tensor in tensors], False)[place] - exact
    return _largest(change) * (_SHAKEN / max(roundings, default=1.0))


def _shaken(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a copy whose numbers differ by some roundings."""
    other = copied(tensor, tensor.dtype)
    if tensor.is_floating_point():
        flat = flat_view(other)
        steps = torch.randn(flat.shape, dtype=torch.float64, device=flat.device, generator=generator)
        flat.copy_(flat * (1 + 2 * torch.finfo(flat.dtype).eps * steps))
    return other


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _drawn(program: Program, sizes: Mapping[sympy.Symbol, int], form: Form) -> list[torch.Tensor]:
    """Draw inputs that a program accepts.

    Raises:
        Unsupported: it accepts none, or it is too large.
    """
    buffers = [program.buffers[entry] for entry in program.inputs if isinstance(entry, str)]
    shapes = {buffer.name: _layout(buffer, sizes)[0] for buffer in program.buffers.values()}
    if sum(map(math.prod, shapes.values())) > _LARGEST:
        raise Unsupported("its tensors are too large to be evaluated")
    device = buffers[0].device if buffers else torch.device("cpu")
    refusal: Exception | None = None
    for draw in attempts(device, {size for buffer in buffers for size in shapes[buffer.name]}):
        tensors = [_draw(draw, buffer, sizes) for buffer in buffers]
        try:
            _both(form, tensors)
        except (VerifyError, CheckFailed, IndexError) as error:
            refusal = error
        else:
            return tensors
        if draw.is_last:
            break
    raise Unsupported(f"it accepts no inputs that were drawn: {refusal}")


def _layout(buffer: Buffer, sizes: Mapping[sympy.Symbol, int]) -> tuple[list[int], list[int]]:
    return [size_value(size, sizes) for size in buffer.shape], [size_value(size, sizes) for size in buffer.strides]


def _empty(buffer: Buffer, sizes: Mapping[sympy.Symbol, int], exact: bool) -> torch.Tensor:
    """Return the tensor of a result, full of a number that nothing computes."""
    dtype = torch.float64 if buffer.dtype.is_floating_point and not exact else buffer.dtype
    return torch.empty_strided(*_layout(buffer, sizes), dtype=dtype, device=buffer.device).fill_(_OTHER)


def _draw(draw: Draw, buffer: Buffer, sizes: Mapping[sympy.Symbol, int]) -> torch.Tensor:
    shape, strides = _layout(buffer, sizes)
    host = buffer.device.type == "cpu"
    if buffer.dtype.is_floating_point:
        return draw.normal(shape, strides, buffer.dtype, host=host)
    if buffer.dtype is torch.bool:
        return draw.booleans(shape, strides, host=host)
    return draw.integers(shape, strides, buffer.dtype, host=host)


__all__ = ["Rewrites"]
