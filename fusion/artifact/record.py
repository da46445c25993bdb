"""Records a spliced module as steps that `steps.py` runs.

Input: the module that `splice` makes of a schedule, with the numbers of its kernels; output: JSON.  Registers are
numbered: first those of the inputs, in the order that the caller gives, then one for each node.  Functions that steps
may not call are refused, with the operation's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._sympy.printers import PythonPrinter

from fusion.artifact.functions import NAMES, STEP_FUNCTIONS
from fusion.artifact.manifest import CalledFunction, Json, StepCall
from fusion.artifact.planned_sequences import PlannedSequence
from fusion.artifact.values import written
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.sizes import Computed
from fusion.runtime.size_text import evaluated, named
from fusion.runtime.sizes import COMPUTED
from fusion.runtime.splice import LAUNCH, lines_of
from fusion.schedule.kernels import KernelCall


@dataclass(slots=True)
class Recording:
    """A list of steps.

    Attributes:
        steps: in order.
        registers: their number.
        results: the results of the module.
        literals: tensors that the module holds, and their registers.
        operations: the names of the operations and functions that are called.
    """

    steps: list[StepCall] = field(default_factory=list)
    registers: int = 0
    results: tuple[Json, ...] = ()
    literals: dict[int, torch.Tensor] = field(default_factory=dict)
    operations: set[str] = field(default_factory=set)


def recorded(module: fx.GraphModule, kernels: Mapping[Kernel, int]) -> Recording:
    """Record a module.

    Args:
        kernels: kernel → its number; others launch nothing.

    Raises:
        Unsupported: a step cannot be recorded.
    """
    recording = Recording()
    places: dict[fx.Node, int] = {}

    def register(value: object) -> int | None:
        return places[value] if isinstance(value, fx.Node) else None

    for node in module.graph.nodes:
        if node.op == "output":
            recording.results = tuple(written(result, register) for result in node.args[0])
            continue
        places[node] = len(places)
        if node.op == "get_attr":
            held = getattr(module, str(node.target))
            if not isinstance(held, torch.Tensor):
                raise Unsupported(
                    "a program with branches or loops on data (torch.cond, while_loop, scan) is not saved",
                    hint="save each branch as a program of its own",
                )
            recording.literals[places[node]] = held
        elif node.op != "placeholder":
            called = _called(node, kernels)
            if called is not None:
                args, named = (_written(node, each, register) for each in (node.args, node.kwargs.values()))
                if named:
                    called["kwargs"] = dict(zip(node.kwargs, named, strict=True))
                recording.steps.append({**called, "args": args, "result": places[node]})
                recording.operations |= {name for name in (called.get("operation"), called.get("function")) if name}
    recording.registers = len(places)
    return recording


def _written(node: fx.Node, arguments: Iterable[object], register: Callable[[object], int | None]) -> list[Json]:
    try:
        return [written(argument, register) for argument in arguments]
    except ValueError as error:
        raise Unsupported(f"a call of {_name(node)} is not saved, with {error} as an argument") from error


def _called(node: fx.Node, kernels: Mapping[Kernel, int]) -> CalledFunction | None:
    """Return the callee of a node; None for a kernel that launches nothing."""
    if isinstance(node.target, PlannedSequence):
        return {"sequence": node.target.entry(kernels)}
    if LAUNCH in node.meta:
        return _launch(node.meta[LAUNCH], kernels)
    if COMPUTED in node.meta:
        return {"size": text_of(node.meta[COMPUTED])}
    if node.op == "call_method" and (name := f"torch.Tensor.{node.target}") in STEP_FUNCTIONS:
        return {"function": name}
    if isinstance(node.target, OpOverload):
        return {"operation": str(node.target)}
    if callable(node.target) and node.target in NAMES:
        return {"function": NAMES[node.target]}
    raise Unsupported(f"a call of {_name(node)} is not saved")


def _launch(call: KernelCall, kernels: Mapping[Kernel, int]) -> CalledFunction | None:
    if call.kernel not in kernels:
        return None
    lines = [*lines_of(call)]
    return {"kernel": kernels[call.kernel], "lines": lines} if lines else {"kernel": kernels[call.kernel]}


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def text_of(size: Computed) -> str:
    """Return the meaning of a size as text over x0, x1, …, which stand for `size.given`.

    Raises:
        Unsupported: it has no such text.
    """
    names = {symbol: sympy.Symbol(f"x{k}", integer=True) for k, symbol in enumerate(size.given)}
    return expression_text(size.meaning.xreplace(names), [str(name) for name in names.values()])


def expression_text(expression: sympy.Basic, names: Sequence[str]) -> str:
    """Return a size, or a condition on sizes, as text that `size_text` evaluates.

    Raises:
        Unsupported: it has no such text.
    """
    text = PythonPrinter().doprint(expression)
    try:
        evaluated(text, named(names))
    except ValueError as error:
        raise Unsupported(f"a size or condition is not saved: {text} ({error})") from error
    return str(text)


__all__ = ["Recording", "expression_text", "recorded", "text_of"]
