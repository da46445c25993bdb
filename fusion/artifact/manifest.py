"""Defines the form of an artifact's JSON: its manifest, its steps, and the structure of arguments and results.

`save.py` and the modules that it calls write these entries, `load.py` and the modules that it calls read them.  A pair
is an array in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict, final

from typing_extensions import NotRequired

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"
"""A value as `values.py` writes it."""

Extent: TypeAlias = "int | str"
"""A size, a stride or an offset: a number, or text over the program's sizes."""

# The structure of nested values -------------------------------------------------------------------------------------

Structure: TypeAlias = "Literal['*'] | TupleOf | ListOf | DictOf | RegisteredType"
"""A leaf, or a container with the structures of its parts."""


@final
class TupleOf(TypedDict):
    """A tuple."""

    tuple: Sequence[Structure]


@final
class ListOf(TypedDict):
    """A list."""

    list: Sequence[Structure]


@final
class DictOf(TypedDict):
    """A dictionary, as pairs of a key and a structure."""

    dict: Sequence[tuple[str | int, Structure]]


@final
class RegisteredType(TypedDict):
    """A type that is registered with PyTorch's pytree under a name, with the text that the type's functions write."""

    type: str
    context: object
    parts: Sequence[Structure]


# Arguments ----------------------------------------------------------------------------------------------------------


class TensorLayout(TypedDict):
    """The dtype, device, shape and strides of a tensor."""

    dtype: Json
    device: Json
    shape: Sequence[Extent]
    strides: Sequence[Extent]


class TensorArgument(TensorLayout):
    """A tensor among the arguments; a `kept` tensor is changed by the program, or seen through a result."""

    name: str
    kept: bool


@final
class TensorLeaf(TypedDict):
    """A leaf of the arguments that is a tensor."""

    tensor: TensorArgument


@final
class SizeLeaf(TypedDict):
    """A leaf of the arguments that is a size, with its name."""

    size: str


@final
class ConstantLeaf(TypedDict):
    """A leaf of the arguments that is a part of the program."""

    name: str
    constant: Json


LeafEntry: TypeAlias = "TensorLeaf | SizeLeaf | ConstantLeaf"


class SizePlace(TypedDict):
    """The number of an argument that a size is read off: a dimension's size or stride, or the value of a leaf."""

    leaf: int
    of: Literal["size", "stride", "value"]
    dimension: int | None


class SizeEntry(SizePlace):
    """A size by its name: the number at the place is `times` the size, plus `plus`."""

    name: str
    times: int
    plus: int


class ArgumentsEntry(TypedDict):
    """The arguments of a program.

    Attributes:
        structure: of a tuple with the positional arguments and a dictionary of the others.
        positional: the names of parameters that take positional arguments.
        first: the register of the first input that is no weight.
        passed: sizes that the program takes before its other inputs.
        inequalities: conditions on the sizes.
        changed: the positions of the leaves that are changed in place.
    """

    structure: Structure
    positional: Sequence[str]
    first: int
    leaves: Sequence[LeafEntry]
    sizes: Sequence[SizeEntry]
    passed: Sequence[Extent]
    inequalities: Sequence[str]
    changed: Sequence[int]


# Results ------------------------------------------------------------------------------------------------------------


class ViewLayout(TypedDict):
    """The layout of a view; its offset is counted from the first element of the viewed tensor."""

    shape: Sequence[Extent]
    strides: Sequence[Extent]
    offset: Extent


@final
class RegisterResult(TypedDict):
    """A result that is the value of a register, or a view of it."""

    register: int
    view: NotRequired[ViewLayout]


@final
class ConstantResult(TypedDict):
    """A result that is a part of the program."""

    constant: Json


ResultEntry: TypeAlias = "RegisterResult | ConstantResult"


class ResultsEntry(TypedDict):
    """The results of a program: their structure, and its leaves."""

    structure: Structure
    leaves: Sequence[ResultEntry]


# Kernels, weights, steps --------------------------------------------------------------------------------------------


class ArtifactKernel(TypedDict):
    """A kernel.

    Attributes:
        source, kernel: the members with its source, and with itself as text.
        objects, carried: architecture → the member with its object; the one with binaries of the target's tools.
        name, function, tensors, sizes: of its `Callee`.
        launch: of its `Binary`.
    """

    source: str
    objects: dict[str, str]
    kernel: NotRequired[str]
    name: str
    function: str
    tensors: int
    sizes: int
    launch: NotRequired[dict[str, int]]
    carried: NotRequired[dict[str, str]]


class WeightEntry(TypedDict):
    """A weight: its register, the name under which its tensor is stored, its own name, and its kind."""

    register: int
    tensor: str
    name: str
    kind: str


class TensorEntry(TypedDict):
    """A stored tensor; `state` says whether it is a parameter or buffer."""

    state: bool
    dtype: Json
    shape: Sequence[int]
    strides: Sequence[int]


class FileReference(TypedDict):
    """A file beside the artifact, with its hash."""

    name: str
    sha256: str


class Manifest(TypedDict):
    """The manifest.

    Attributes:
        format, name, fusion, torch, python: versions, and the name of the program.
        target, device: that the kernels are for.
        architectures: architecture → the features that its objects need of a machine.
        registers: their number.
        operations: the operations and functions that steps call → their schemas.
        weights: the tensors that the program reads.
        changed_weights: the registers of the weights that it changes.
        state: the name of a parameter or buffer → the name under which its tensor is stored.
        tensors: the stored tensors by name.
        sequences: launches kernels in a row, if steps do that.
        weights_file: the file that holds the state, if that is not in the artifact.
        members: member → its hash.
    """

    format: int
    name: str
    fusion: str
    torch: str
    python: str
    target: str
    device: str
    architectures: dict[str, list[str]]
    registers: int
    arguments: ArgumentsEntry
    results: ResultsEntry
    operations: dict[str, str]
    kernels: Sequence[ArtifactKernel]
    weights: Sequence[WeightEntry]
    changed_weights: Sequence[int]
    state: dict[str, str]
    tensors: dict[str, TensorEntry]
    sequences: NotRequired[SequenceObjects]
    weights_file: NotRequired[FileReference]
    members: NotRequired[dict[str, str]]


class PartEntry(TypedDict):
    """A tensor that begins at a byte of the workspace of a sequence, or of the argument with the number `of`."""

    begin: int
    shape: Sequence[int]
    strides: Sequence[int]
    dtype: Json
    of: NotRequired[int]


class SequenceLaunch(TypedDict):
    """A launch of a sequence: the kernel, the program's lines, and the place of each tensor.

    A place is the number of an argument of the step, or a part of that or of the workspace.
    """

    kernel: int
    lines: Sequence[str]
    places: Sequence[int | PartEntry]


class SequenceEntry(TypedDict):
    """Launches in a row, and the bytes of their workspace."""

    launches: Sequence[SequenceLaunch]
    workspace: int


class SequenceObjects(TypedDict):
    """The function that launches sequences: the member with its source, and architecture → the one with its object."""

    source: str
    objects: dict[str, str]


class CalledFunction(TypedDict, total=False):
    """The function that a step calls, with its arguments by name: a kernel with the program's lines, several kernels in
    a row, or another function.
    """

    kernel: int
    lines: list[str]
    sequence: SequenceEntry
    operation: str
    function: str
    size: str
    kwargs: dict[str, Json]


class StepCall(CalledFunction):
    """A call: its arguments, and the register of its result."""

    args: list[Json]
    result: int


__all__ = [
    "ArgumentsEntry",
    "ArtifactKernel",
    "CalledFunction",
    "ConstantResult",
    "Extent",
    "Json",
    "LeafEntry",
    "Manifest",
    "PartEntry",
    "RegisterResult",
    "RegisteredType",
    "ResultEntry",
    "ResultsEntry",
    "SequenceEntry",
    "SequenceLaunch",
    "SequenceObjects",
    "SizeEntry",
    "SizePlace",
    "StepCall",
    "Structure",
    "TensorArgument",
    "TensorEntry",
    "TensorLayout",
    "TupleOf",
    "ViewLayout",
    "WeightEntry",
]
