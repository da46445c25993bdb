"""Represents a program that was loaded from an artifact: a callable with weights.

It computes the same as the saved program, in the mode (train or eval) in which it was saved.  It holds its weights
as plain tensors; buffers that the program changes, such as caches, are changed in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion.artifact.arguments import Arguments, SizeOf, size_function
from fusion.artifact.manifest import Manifest, ResultEntry
from fusion.artifact.steps import SavedProgram
from fusion.artifact.trees import assembled, leaves
from fusion.artifact.values import read
from fusion.lowering.errors import ArtifactError, Unsupported
from fusion.runtime.dispatch_guards import within


class Artifact:
    """Runs a program that `fusion.save` has written; `fusion.load` returns it.

    Attributes:
        manifest: the description in the file: versions, architectures, arguments, inequalities, hashes.
        notes: differences between this machine and the kernels', and the measures taken.
    """

    def __init__(
        self,
        manifest: Manifest,
        program: SavedProgram,
        weights: Mapping[str, torch.Tensor],
        registers: Mapping[int, torch.Tensor],
        notes: Sequence[str],
    ) -> None:
        self.manifest, self.notes = manifest, tuple(notes)
        self._program, self._weights = program, dict(weights)
        entry = manifest["arguments"]
        self._arguments = Arguments.of(entry)
        self._structure, self._positional = entry["structure"], entry["positional"]
        self._first = int(entry["first"])
        self._results = [_Result(result, self._arguments.names) for result in manifest["results"]["leaves"]]
        self._changed = [registers[number] for number in manifest["changed_weights"]]
        self._registers: list[object] = [None] * program.registers
        for number, value in (*program.constants.items(), *registers.items()):
            self._registers[number] = value

    @property
    def inequalities(self) -> tuple[str, ...]:
        """The conditions on sizes, as text over the sizes that `manifest["arguments"]["sizes"]` lists."""
        return tuple(self.manifest["arguments"]["inequalities"])

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the program.

        Raises:
            ArtifactError: it was not saved for such arguments.
            FusionError: as the kernels raise it, for an index out of range.
        """
        if reason := within():
            raise Unsupported(f"a saved program does not run inside of {reason}")
        given = [*leaves(self._structure, self._bound(args, kwargs))]
        inputs, sizes = self._arguments.checked(given, self._changed)
        registers = self._registers.copy()
        registers[self._first : self._first + len(inputs)] = inputs
        self._run(registers)
        results = [result.of(registers, sizes) for result in self._results]
        return assembled(self.manifest["results"]["structure"], results)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # a graph break: it is compiled already

    def _run(self, registers: list[object]) -> None:
        """Run all steps; casts of autocast are steps, and none is added where the caller has it on."""
        if not torch._C._is_any_autocast_enabled():
            self._program.run(registers)
            return
        with torch._C._DisableAutocast():
            self._program.run(registers)

    def _bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, dict[str, object]]:
        """Return positional arguments, also for the ones passed by name, and the remaining arguments by name."""
        remaining, positional = dict(kwargs), [*args]
        for name in self._positional[len(args) :]:
            if name not in remaining:
                break
            positional.append(remaining.pop(name))
        return tuple(positional), remaining

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters and persistent buffers by name, as the tensors that the program reads."""
        return dict(self._weights)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Copy values into parameters and buffers; nothing is compiled.

        Args:
            state: values by name, as `state_dict` of the module that was saved returns them.
            strict: names that are missing or not known are an error; else they are passed over.

        Raises:
            ArtifactError: names differ, or the shape or dtype of a tensor; no weight is changed then.
        """
        missing, unknown = sorted(self._weights.keys() - state.keys()), sorted(state.keys() - self._weights.keys())
        if strict and (missing or unknown):
            raise ArtifactError(f"the state has other names: missing {missing[:5]}, not known {unknown[:5]}")
        known = {name: value for name, value in state.items() if name in self._weights}
        for name, value in known.items():
            refuse_other(name, value, self._weights[name])
        with torch.no_grad():
            for name, value in known.items():
                self._weights[name].copy_(value)

    def __repr__(self) -> str:
        kernels, steps = len(self.manifest["kernels"]), len(self._program.instructions)
        return f"Artifact({self.manifest['name']}: {kernels} kernels, {steps} steps, {len(self._weights)} weights)"


def refuse_other(name: str, value: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuse a value that does not fit a weight.

    Raises:
        ArtifactError: its shape or its dtype is another one.
    """
    if value.shape != weight.shape or value.dtype is not weight.dtype:
        raise ArtifactError(
            f"{name} is {value.dtype} of shape {[*value.shape]}, and this was saved for {weight.dtype} of shape"
            f" {[*weight.shape]}"
        )


class _Result:
    """A result: a register, a constant, a size, or a view of a register."""

    def __init__(self, entry: ResultEntry, names: Sequence[str]) -> None:
        self._register: int | None = None
        self._constant: object = None
        self._view: tuple[tuple[SizeOf, ...], tuple[SizeOf, ...], SizeOf] | None = None
        if "constant" in entry:
            self._constant = read(entry["constant"])
            return
        self._register, view = entry["register"], entry.get("view")
        if view is not None:
            shape, strides = (tuple(size_function(s, names) for s in each) for each in (view["shape"], view["strides"]))
            self._view = shape, strides, size_function(view["offset"], names)

    def of(self, registers: Sequence[object], sizes: Sequence[int]) -> object:
        if self._register is None:
            return self._constant
        value = registers[self._register]
        if self._view is None:
            return value
        assert isinstance(value, torch.Tensor)
        shape, strides = ([size(sizes) for size in each] for each in self._view[:2])
        return torch.as_strided(value, shape, strides, value.storage_offset() + self._view[2](sizes))


__all__ = ["Artifact", "refuse_other"]
