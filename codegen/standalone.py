"""Describes a program that runs without PyTorch: its inputs and results, its memory, and its launches in order.

A compiled graph becomes such a description (`fusion/artifact/standalone/`), and a target that has libraries makes one
of it.  Sizes and conditions are text in Python's form over the names of the program's sizes, such as `4*batch // 2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from fusion.codegen.binary import Callee

Text = str
"""A size, or a condition on sizes."""


class Memory(Enum):
    """Locates a tensor: in memory that the caller passes, in the workspace of a run, or in the library itself."""

    WEIGHT = "weight"
    INPUT = "input"
    OUTPUT = "output"
    SLOT = "slot"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """The start of a tensor: `offset` elements of `item` bytes after the start of the weight, input, … `number`."""

    memory: Memory
    number: int
    offset: Text = "0"
    item: int = 1


@dataclass(frozen=True, slots=True)
class InterfaceTensor:
    """A tensor that the program takes or returns.

    Attributes:
        changed: the program writes to it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Text, ...]
    strides: tuple[Text, ...]
    changed: bool = False


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A parameter or buffer: the name of a tensor in a file of safetensors, and the layout that kernels read.

    `check` is the CRC-32 of its elements in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    check: int
    changed: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """Locates a size in the arguments: as a "size" or "stride" of an input, or as its "value"; it is (that - `plus`) /
    `times`.
    """

    name: str
    input: int
    of: str
    dimension: int
    times: int
    plus: int


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel as text, and how its function is called."""

    callee: Callee
    text: str


@dataclass(frozen=True, slots=True)
class StandaloneLaunch:
    """A call of a kernel; `where` names the place in the user's program."""

    kernel: int
    operands: tuple[MemoryPlace, ...]
    sizes: tuple[Text, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a tensor into another one of the same shape and dtype."""

    source: MemoryPlace
    source_strides: tuple[Text, ...]
    to: MemoryPlace
    to_strides: tuple[Text, ...]
    shape: tuple[Text, ...]
    item: int


@dataclass(frozen=True, slots=True)
class BlasProduct:
    """A product of matrices, or of several, by the BLAS that is linked.

    Attributes:
        sizes: the number of products, rows, columns, and the terms of each sum.
        strides: of the product, the row and the column: of the left matrix, of the right one, and of the result.
        adds: whether the result is added to the present content.
    """

    left: MemoryPlace
    right: MemoryPlace
    to: MemoryPlace
    sizes: tuple[Text, Text, Text, Text]
    strides: tuple[Text, ...]
    item: int
    adds: bool


@dataclass(frozen=True, slots=True)
class Seed:
    """A seed of 64 bits, drawn anew at each run from the generator of the model."""

    to: MemoryPlace


@dataclass(frozen=True, slots=True)
class Standalone:
    """A program.

    Attributes:
        weights_file: the name of the file with weights, beside the library.
        slots: the bytes of each part of the workspace: the largest of some sizes.
        constants: the bytes of tensors that are part of the program.
        conditions: conditions on sizes.
    """

    weights_file: str
    inputs: tuple[InterfaceTensor, ...]
    outputs: tuple[InterfaceTensor, ...]
    weights: tuple[StoredWeight, ...]
    sizes: tuple[Size, ...]
    conditions: tuple[Text, ...]
    slots: tuple[tuple[Text, ...], ...]
    constants: tuple[bytes, ...]
    sources: tuple[KernelSource, ...]
    steps: tuple[StandaloneLaunch | Copy | BlasProduct | Seed, ...]


__all__ = [
    "BlasProduct",
    "Copy",
    "InterfaceTensor",
    "KernelSource",
    "Memory",
    "MemoryPlace",
    "Seed",
    "Size",
    "Standalone",
    "StandaloneLaunch",
    "StoredWeight",
    "Text",
]
