"""Decides which tensors of a program are one, and writes the file that they share.

Input: the parameters and buffers of a program; output: which of them are tied, and a file of safetensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from fusion.artifact.container import content_of
from fusion.artifact.weights import bytes_of, pieces, tensors_in
from fusion.lowering.errors import ArtifactError, Unsupported


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tied tensors; empty tensors are not tied."""
    if not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def refuse_shared_memory(held: Sequence[tuple[str, int, torch.Tensor]], changed: Collection[int]) -> None:
    """Refuse a program that changes memory which two of its tensors share.

    Args:
        held: the name, the number and the value of each.
        changed: the numbers of the tensors that are changed in place.

    Raises:
        Unsupported: there is one.
    """
    memory = [tensor.untyped_storage().data_ptr() for *_, tensor in held]
    for name, number, tensor in held:
        if number in changed and tensor.numel() and memory.count(tensor.untyped_storage().data_ptr()) > 1:
            raise Unsupported(f"{name} is changed in place, and shares memory with another tensor: it is not saved")


def written_beside(path: Path, beside: Path, state: Mapping[str, torch.Tensor]) -> str:
    """Write weights beside `path`, or check the weights that are there; return the hash of the file.

    Raises:
        ArtifactError: `beside` leads elsewhere, or the file that is there holds other tensors.
    """
    if beside.is_absolute() or len(beside.parts) > 1:
        raise ArtifactError(f"weights are in a file beside {path}", hint=f"give its name: {beside.name}")
    place = path.parent / beside
    if not place.exists():
        with place.open("xb") as file:
            file.writelines(pieces(state))
    content = content_of(place)
    there = tensors_in(content)
    for name, tensor in state.items():
        if name not in there or not _equal(there[name], tensor):
            raise ArtifactError(f"{place} holds another {name} than the program", hint="name a new file")
    return sha256(bytes_of(content)).hexdigest()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal in every bit."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or bytes_of(one.contiguous()) == bytes_of(other.contiguous())


__all__ = ["identity", "refuse_shared_memory", "written_beside"]
