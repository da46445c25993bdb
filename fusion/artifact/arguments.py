"""Checks the arguments of a call against the arguments of the saved program, and computes its sizes.

Input: leaves of the arguments; output: the values of the program's inputs, and its sizes.  Dtypes, devices, constants
and fixed sizes are compared.  Sizes that vary are read off the tensors, and have to satisfy the inequalities of the
manifest.  A tensor with other strides is copied, unless the program changes it or returns a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusion.artifact.manifest import ArgumentsEntry, LeafEntry, TensorArgument
from fusion.artifact.values import read
from fusion.lowering.errors import ArtifactError
from fusion.runtime.disjoint import Disjoint
from fusion.runtime.size_text import Evaluated, evaluated, named

SizeOf = Callable[[Sequence[int]], int]


def size_function(size: int | str, names: Sequence[str]) -> SizeOf:
    """Return the function that computes a size, given as a number or as text over `names`."""
    if isinstance(size, int):
        return lambda sizes: size
    compute = evaluated(size, named(names))
    return lambda sizes: int(compute(sizes))


@dataclass(frozen=True, slots=True)
class ExampleTensor:
    """A tensor among the arguments.

    Attributes:
        name: of the parameter.
        shape: numbers, or text over the program's sizes.
        layout: computes the shape and the strides.
        kept: the program changes it, or returns a view of it: it is not copied.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | str, ...]
    layout: tuple[tuple[SizeOf, ...], tuple[SizeOf, ...]]
    kept: bool

    @classmethod
    def of(cls, entry: TensorArgument, names: Sequence[str]) -> ExampleTensor:
        """Read an entry of the manifest."""
        shape, strides = (
            tuple(size_function(size, names) for size in sizes) for sizes in (entry["shape"], entry["strides"])
        )
        dtype, device = read(entry["dtype"]), read(entry["device"])
        assert isinstance(dtype, torch.dtype) and isinstance(device, torch.device)
        return cls(entry["name"], dtype, device, tuple(entry["shape"]), (shape, strides), bool(entry["kept"]))

    def examined(self, value: object) -> torch.Tensor:
        """Return a value, if it has the type, dtype, device and rank of the saved program's argument.

        Raises:
            ArtifactError: they are not.
        """
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(value, torch.Tensor):
            raise ArtifactError(f"{self.name} is a {type(value).__name__}, and this was saved for a tensor")
        if value.layout is not torch.strided:
            raise ArtifactError(f"{self.name} is a {value.layout} tensor, and this was saved for a dense one")
        if value.dtype is not self.dtype or value.device != self.device:
            raise ArtifactError(
                f"{self.name} is {value.dtype} on {value.device}, and this was saved for {self.dtype} on {self.device}"
            )
        if value.ndim != len(self.shape):
            raise self.refusal(value)
        if value.requires_grad and torch.is_grad_enabled():
            raise ArtifactError(
                f"{self.name} requires a gradient, which a saved program does not compute",
                hint="call it under torch.no_grad(), or pass tensor.detach()",
            )
        return value

    def refusal(self, value: torch.Tensor) -> ArtifactError:
        """Return the error for a tensor of another shape."""
        shape = ", ".join(map(str, self.shape))
        return ArtifactError(f"{self.name} has shape {[*value.shape]}, and this was saved for [{shape}]")

    def laid_out(self, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the tensor in the layout that kernels expect.

        Raises:
            ArtifactError: its shape is another one, or its strides are and it must not be copied.
        """
        shape, strides = ([size(sizes) for size in each] for each in self.layout)
        if [*value.shape] != shape:
            raise self.refusal(value)
        differs = any(
            size > 1 and stride != expected
            for size, stride, expected in zip(shape, value.stride(), strides, strict=True)
        )
        plain = not (value.is_neg() or value.is_conj())
        if plain and (not differs or not value.numel()):
            return value
        if self.kept and not plain:
            raise ArtifactError(
                f"{self.name} is a conjugate, or negated, where it is read; it is changed in place, or a result is a"
                " view of it, so it cannot be copied",
                hint="pass tensor.resolve_conj().resolve_neg()",
            )
        if self.kept:
            raise ArtifactError(
                f"{self.name} has strides {[*value.stride()]}, and this was saved for {strides}; it is changed in"
                " place, or a result is a view of it, so it cannot be copied",
                hint="pass a copy with these strides",
            )
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(value)


@dataclass(frozen=True, slots=True)
class SizeSource:
    """Locates a size in the arguments: as a "size" or "stride" of an argument, or as its "value": `times` the size,
    plus `plus`.
    """

    leaf: int
    of: str
    dimension: int | None
    times: int
    plus: int

    def read(self, value: object) -> int:
        """Return the size."""
        if isinstance(value, torch.Tensor) and self.dimension is not None:
            value = (value.shape if self.of == "size" else value.stride())[self.dimension]
        assert isinstance(value, int)
        return (value - self.plus) // self.times


@dataclass(frozen=True, slots=True)
class Arguments:
    """Describes the arguments of a program.

    Attributes:
        leaves: a tensor, a constant, or None for a size, in order.
        sources: of each size, in order.
        passed: sizes that the program takes before its other inputs.
        inequalities: each as text, and as a function of the sizes.
        changed: the positions of tensors that are changed in place.
    """

    leaves: tuple[ExampleTensor | _Constant | None, ...]
    names: tuple[str, ...]
    sources: tuple[SizeSource, ...]
    passed: tuple[SizeOf, ...]
    inequalities: tuple[tuple[str, Evaluated], ...]
    changed: frozenset[int]

    @classmethod
    def of(cls, entry: ArgumentsEntry) -> Arguments:
        """Read an entry of the manifest."""
        sizes = entry["sizes"]
        names = tuple(size["name"] for size in sizes)
        return cls(
            tuple(_leaf(leaf, names) for leaf in entry["leaves"]),
            names,
            tuple(
                SizeSource(size["leaf"], size["of"], size["dimension"], size["times"], size["plus"]) for size in sizes
            ),
            tuple(size_function(size, names) for size in entry["passed"]),
            tuple((text, evaluated(text, named(names))) for text in entry["inequalities"]),
            frozenset(entry["changed"]),
        )

    def checked(self, given: Sequence[object], held: Sequence[torch.Tensor]) -> tuple[list[object], list[int]]:
        """Return the values of the program's inputs, and its sizes.

        Args:
            given: the leaves of the arguments.
            held: the program's weights that it changes in place.

        Raises:
            ArtifactError: it was not saved for these.
        """
        values = [self._examined(leaf, value) for leaf, value in zip(self.leaves, given, strict=True)]
        sizes = [source.read(values[source.leaf]) for source in self.sources]
        for text, holds in self.inequalities:
            if not holds(sizes):
                known = ", ".join(f"{name} = {size}" for name, size in zip(self.names, sizes, strict=True))
                raise ArtifactError(f"this was saved for sizes with {text}, and {known}", hint=self._read_from())
        inputs: list[object] = [size(sizes) for size in self.passed]
        inputs += [
            leaf.laid_out(value, sizes)
            if isinstance(leaf, ExampleTensor) and isinstance(value, torch.Tensor)
            else value
            for leaf, value in zip(self.leaves, values, strict=True)
            if not isinstance(leaf, _Constant)
        ]
        self._refuse_overlaps(values, held)
        return inputs, sizes

    def _examined(self, leaf: ExampleTensor | _Constant | None, value: object) -> object:
        if isinstance(leaf, ExampleTensor):
            return leaf.examined(value)
        if isinstance(leaf, _Constant):
            return leaf.examined(value)
        if type(value) is not int:
            raise ArtifactError(f"an argument is a {type(value).__name__}, and this was saved for an int")
        return value

    def _read_from(self) -> str:
        """Describe the dimension or argument that each size is read from, for a message."""
        where = []
        for name, source in zip(self.names, self.sources, strict=True):
            leaf = self.leaves[source.leaf]
            place = leaf.name if isinstance(leaf, ExampleTensor) else f"argument {source.leaf}"
            read = "" if source.of == "value" else f".{source.of}({source.dimension})"
            where.append(f"{name} is {place}{read}")
        return "; ".join(where)

    def _refuse_overlaps(self, values: Sequence[object], held: Sequence[torch.Tensor]) -> None:
        if not self.changed and not held:
            return
        tensors = [k for k, leaf in enumerate(self.leaves) if isinstance(leaf, ExampleTensor)]
        everything = [*values, *held]
        own = range(len(values), len(everything))
        if not Disjoint(frozenset({*self.changed, *own}), (*tensors, *own)).holds(everything):
            raise ArtifactError(
                "a tensor that this changes in place shares memory with another argument",
                hint="pass copies (clone) of what overlaps",
            )


@dataclass(frozen=True, slots=True)
class _Constant:
    """An argument whose value is fixed by the program."""

    name: str
    value: object

    def examined(self, value: object) -> object:
        both_nan = value != value and self.value != self.value
        if type(value) is not type(self.value) or not (value == self.value or both_nan):
            raise ArtifactError(f"{self.name} is {value!r}, and this was saved for {self.value!r}")
        return value


def _leaf(entry: LeafEntry, names: Sequence[str]) -> ExampleTensor | _Constant | None:
    if "tensor" in entry:
        return ExampleTensor.of(entry["tensor"], names)
    return _Constant(entry["name"], read(entry["constant"])) if "constant" in entry else None


__all__ = ["Arguments", "SizeOf", "size_function"]
