"""Runs the steps of a compiled program.

Input: steps as `record.py` wrote them, and the launchers of their kernels; output: a function of registers, which hold
weights, arguments and every intermediate value.  A step is a function, the places of its arguments, the register of its
result, and the registers whose live range ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

from fusion.artifact.functions import STEP_FUNCTIONS, operation
from fusion.artifact.manifest import StepCall
from fusion.artifact.sequences import sequence_of
from fusion.artifact.values import Register, read
from fusion.codegen.c.sequence import InSequence
from fusion.runtime.located import located
from fusion.runtime.size_text import Evaluated, evaluated, named

Call: TypeAlias = Callable[..., object]
Getter: TypeAlias = Callable[[Sequence[object]], "tuple[object, ...]"]
Instruction: TypeAlias = "tuple[Call, Getter, int, tuple[int, ...]]"


@dataclass(slots=True)
class SavedProgram:
    """Runs the steps of a saved program over registers.

    Attributes:
        registers: the number of registers.
        constants: register → its value, where that is the same in every call.
        instructions: for each step its function, a getter of its arguments, the register of its result, and the
            registers that are not needed any more.
    """

    registers: int
    constants: dict[int, object] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)

    def run(self, registers: list[object]) -> None:
        """Run all steps on `registers`, in place."""
        for function, arguments, result, dead in self.instructions:
            registers[result] = function(*arguments(registers))
            for number in dead:
                registers[number] = None


def program_of(
    steps: Sequence[StepCall],
    registers: int,
    launchers: Sequence[Call],
    kept: Sequence[int],
    in_sequence: InSequence | None = None,
) -> SavedProgram:
    """Return the program of some steps.

    Args:
        registers: the number of registers of the steps.
        in_sequence: launches several kernels in one call, if it can be loaded here.
        kept: the registers that are read once all steps have run.

    Raises:
        LookupError: this process lacks an operation; ValueError, TypeError: the steps are malformed.
    """
    return _Assembler(registers, launchers, in_sequence).assemble(steps, {*kept})


@dataclass(slots=True)
class _Called:
    """A call before it is known which registers it is the last to read."""

    function: Call
    reads: tuple[int, ...]
    result: int


class _Assembler:
    def __init__(self, registers: int, launchers: Sequence[Call], in_sequence: InSequence | None) -> None:
        self.program, self.launchers, self.in_sequence = SavedProgram(registers), launchers, in_sequence
        self.given = registers
        self.calls: list[_Called] = []

    def assemble(self, steps: Sequence[StepCall], kept: set[int]) -> SavedProgram:
        for step in steps:
            self._step(step)
        written = {call.result for call in self.calls}
        alive = kept | self.program.constants.keys()
        instructions: list[Instruction] = []
        for call in reversed(self.calls):
            dead = tuple(number for number in {*call.reads, call.result} - alive if number in written)
            alive.update(call.reads)
            instructions.append((call.function, _getter(call.reads), call.result, dead))
        self.program.instructions = instructions[::-1]
        return self.program

    def _step(self, step: StepCall) -> None:
        args = [self._place(read(value)) for value in step["args"]]
        kwargs = step.get("kwargs", {})
        args += [self._place(read(value)) for value in kwargs.values()]
        function = self._function(step)
        self.calls.append(_Called(_with_keywords(function, [*kwargs]), tuple(args), int(step["result"])))

    def _function(self, step: StepCall) -> Call:
        if "kernel" in step:
            launch = self.launchers[step["kernel"]]
            return located(launch, step["lines"]) if step.get("lines") else launch
        if "sequence" in step:
            return sequence_of(step["sequence"], self.launchers, self.in_sequence)
        if "operation" in step:
            return operation(step["operation"])
        if "size" in step:
            names = [f"x{k}" for k in range(len(step["args"]))]
            return partial(_size, evaluated(step["size"], named(names)))
        return STEP_FUNCTIONS[step["function"]]

    def _place(self, value: object) -> int:
        """Return the register of a value; one of its own for a constant, or for a list that holds registers."""
        if isinstance(value, Register):
            return value.number
        if isinstance(value, (list, tuple)) and _holds_registers(value):
            parts = tuple(map(self._place, value))
            place = self._new()
            self.calls.append(_Called(_listed if isinstance(value, list) else _tupled, parts, place))
            return place
        place = self._new()
        self.program.constants[place] = value
        return place

    def _new(self) -> int:
        self.program.registers += 1
        return self.program.registers - 1


def _holds_registers(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_registers, value))
    return isinstance(value, Register)


def _listed(*parts: object) -> list[object]:
    return list(parts)


def _tupled(*parts: object) -> tuple[object, ...]:
    return parts


def _size(compute: Evaluated, *sizes: int) -> int:
    return int(compute(sizes))


def _getter(reads: tuple[int, ...]) -> Getter:
    if not reads:
        return lambda registers: ()
    if len(reads) == 1:
        (only,) = reads
        return lambda registers: (registers[only],)
    return cast("Getter", operator.itemgetter(*reads))


def _with_keywords(function: Call, names: Sequence[str]) -> Call:
    """Return a function that takes the arguments with these names after the others."""
    if not names:
        return function
    count = len(names)

    def call(*args: object) -> object:
        return function(*args[:-count], **dict(zip(names, args[-count:], strict=True)))

    return call


__all__ = ["SavedProgram", "program_of"]
