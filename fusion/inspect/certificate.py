"""Defines the certificate of a compiled program, as data and text: the errors of its kernels, and the rewrites checked.

`fusion/diagnosis/` creates it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.inspect.accuracy import LaunchError
from fusion.inspect.agreement import Agreement

GENERATED = "build/generate"
"""The name under which a kernel as it was built is checked."""
_SHOWN = 8
"""Launches that are shown."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Inputs on which a rewrite changes a result.

    Attributes:
        inputs: their kind.
        result: the tensor.
        what: the difference, in words.
    """

    inputs: str
    result: str
    what: str

    def __str__(self) -> str:
        return f"{self.result} with {self.inputs}: {self.what}"


@dataclass(frozen=True, slots=True)
class Checked:
    """A rewrite that was checked.

    Attributes:
        name: the pass, as "stage/pass"; "launches/make_kernels" makes the loops of a kernel.
        origins: the operations of the part, with the lines of the program.
        tried: the kinds of inputs.
        faults: those on which a result changes.
        reason: why the rewrite was not checked; else empty.
    """

    name: str
    origins: tuple[str, ...]
    tried: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def __str__(self) -> str:
        if self.reason:
            return f"not checked: {self.name}: {self.reason}"
        head = f"{'holds' if self.holds else 'BREAKS'}: {self.name} on {len(self.tried)} kinds of inputs"
        return "\n".join([head, *(f"    {line}" for line in (*map(str, self.faults), *self.origins))])


@dataclass(frozen=True, slots=True)
class Certified:
    """A tensor that one launch wrote on the user's inputs.

    Attributes:
        own: its error against float64 on the operands of the launch.
        contribution: the largest change of a result, relative by norms, if the launch were exact.
        result: the result that changes the most; empty if none does.
    """

    own: LaunchError
    contribution: float = 0.0
    result: str = ""

    def __str__(self) -> str:
        wrong = "" if self.own.is_right else "WRONG: "
        own = f"error {self.own.error:.1e}, by its dtypes {self.own.rounding:.1e}"
        share = f"; contributes {self.contribution:.1e} to {self.result}" if self.result else ""
        return "\n".join(
            [
                f"{wrong}kernel {self.own.kernel}, {self.own.tensor}: {own}{share}",
                *map("    {}".format, self.own.origins),
            ]
        )


@dataclass(frozen=True, slots=True)
class Certificate:
    """Holds the checks of a compiled program, with their outcomes.

    Attributes:
        agreement: the results on the user's inputs, compared with eager and float64.
        launches: the launches on these inputs, in the order in which they ran.
        checks: rewrites, and kernels as they were built ("build/generate"), on hostile inputs.
    """

    agreement: Agreement
    launches: tuple[Certified, ...] = ()
    checks: tuple[Checked, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return self.agreement.agrees and all(each.own.is_right for each in self.launches) and not self.broken

    @property
    def broken(self) -> tuple[Checked, ...]:
        """The rewrites and kernels that fail on some inputs."""
        return tuple(check for check in self.checks if not check.holds)

    @property
    def worst(self) -> tuple[Certified, ...]:
        """The launches, wrong ones first, then by their contribution to the results."""
        return tuple(sorted(self.launches, key=lambda each: (each.own.is_right, -each.contribution)))

    def __str__(self) -> str:
        tried = [check for check in self.checks if not check.reason]
        kinds = {kind for check in tried for kind in check.tried}
        lines = [
            f"certificate: {'holds' if self.holds else 'DOES NOT HOLD'}; {len(self.launches)} tensors written by"
            f" launches, {len(tried)} rewrites and kernels on {len(kinds)} kinds of inputs"
        ]
        lines += [f"  {value}" for value in (self.agreement.values if self.holds else self.agreement.differing)]
        lines += [f"  note: {self.agreement.note}"] if self.agreement.note else []
        shown = self.worst[:_SHOWN]
        rest = [*shown, *self.broken, *(check for check in self.checks if check.reason)]
        lines += [f"  {line}" for each in rest for line in str(each).splitlines()]
        if len(self.launches) > _SHOWN:
            lines.append(f"  … and {len(self.launches) - _SHOWN} tensors with smaller contributions")
        return "\n".join(lines)


__all__ = ["GENERATED", "Certificate", "Certified", "Checked", "Fault"]
