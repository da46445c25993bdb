"""Loads a program that was saved, without the compiler.

Input: a file that `fusion.save` wrote; output: a callable.  Nothing here imports Dynamo or an IR, and no compiler is
called on a machine with the features that the objects in the file need.  All members are checked before any is loaded.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch

import fusion
from fusion.artifact.container import content_of, unpack
from fusion.artifact.functions import schema_of
from fusion.artifact.loaded import Artifact, refuse_other
from fusion.artifact.manifest import ArtifactKernel, Manifest, StepCall
from fusion.artifact.steps import program_of
from fusion.artifact.values import read
from fusion.artifact.weights import bytes_of, tensors_in
from fusion.codegen.binary import Arguments, Callee, Loader, Stored, loader_of, sequence_function_of
from fusion.lowering.errors import ArtifactError, BuildError, FusionWarning

FORMAT = 1
"""The version of the form of the file."""

STEPS = "steps.json"
WEIGHTS = "weights.safetensors"
CONSTANTS = "constants.safetensors"

Members = Mapping[str, torch.Tensor]


@torch.inference_mode(mode=False)
def load(
    path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None = None
) -> Artifact:
    """Load a program that `save` has written.

    Loading a file runs the machine code in it: load only files from those you trust.

    Args:
        path: the file.
        weights: other values for the parameters and buffers, by name or as a file of safetensors; by default those in
            the file, or in the file that it refers to.

    Returns:
        A callable that takes the arguments that the program was saved for.

    Raises:
        ArtifactError: the file is damaged, of another version, or cannot run here; nothing of it was loaded.
        OSError: a file cannot be read.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> fusion.save(torch.nn.Linear(3, 2).eval(), f"{folder}/linear.fusion", inputs=(torch.ones(4, 3),))
    >>> load(f"{folder}/linear.fusion")(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """
    file = Path(path)
    manifest, members = unpack(file)
    if manifest.get("format") != FORMAT:
        raise ArtifactError(
            f"{file} has the format {manifest.get('format')!r} of Fusion {manifest.get('fusion')}, and this is Fusion"
            f" {fusion.__version__}, which reads the format {FORMAT}",
            hint="save the program again",
        )
    try:
        notes = _differences(manifest)
        kernels = _Kernels(manifest, members, notes)
        launchers = kernels.launchers()
        held = _tensors(file, manifest, members, weights)
        registers = {entry["register"]: held[entry["tensor"]] for entry in manifest["weights"]}
        steps: list[StepCall] = json.loads(_bytes(members[STEPS]))
        kept = [result["register"] for result in manifest["results"]["leaves"] if "register" in result]
        program = program_of(steps, manifest["registers"], launchers, kept, kernels.in_sequence())
        named = {name: held[tensor] for name, tensor in manifest["state"].items()}
        artifact = Artifact(manifest, program, named, registers, notes)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{file} is malformed: {type(error).__name__}: {error}") from error
    for note in notes:
        warnings.warn(note, FusionWarning, stacklevel=2)
    return artifact


def _differences(manifest: Manifest) -> list[str]:
    """Return how this process differs from the process that saved a program, where that does not matter.

    Raises:
        ArtifactError: it matters.
    """
    lacking = [name for name, schema in manifest["operations"].items() if _schema_here(name) != schema]
    here, there = str(torch.__version__), manifest["torch"]
    if lacking:
        raise ArtifactError(
            f"this was saved with PyTorch {there}, and this is {here}, in which there is no {lacking[0]}, or with other"
            " arguments",
            hint="import the package that defines the operation, or save the program with this version",
        )
    if manifest["device"] != "cpu" and not torch.cuda.is_available():
        raise ArtifactError(
            "this was saved for a GPU, and PyTorch sees none", hint="`fusion doctor` says what PyTorch lacks"
        )
    return [] if here == there else [f"saved with PyTorch {there}, loaded with {here}: all operations are the same"]


def _schema_here(name: str) -> str | None:
    try:
        return schema_of(name)
    except LookupError:
        return None


class _Kernels:
    """The kernels of a program: for each the object that suits this machine best, or its source."""

    def __init__(self, manifest: Manifest, members: Members, notes: list[str]) -> None:
        self._manifest, self._members, self._notes = manifest, members, notes
        self._entries = manifest["kernels"]
        self._arch = ""  # that the loaded objects are for

    def launchers(self) -> list[Callable[..., None]]:
        """Return the launcher of each kernel, in order.

        Raises:
            ArtifactError: there is none for this machine, and none can be compiled.
        """
        if not self._entries:
            return []
        loader = loader_of(self._manifest["target"])
        needs = self._manifest["architectures"]
        fitting = [arch for arch, required in needs.items() if not loader.lacking(required)]
        best = max(fitting, key=lambda arch: len(needs[arch]), default=None)
        if best is None:
            lacks = [f"{arch} needs {', '.join(loader.lacking(required))}" for arch, required in needs.items()]
            return self._rebuilt(
                loader, f"this machine ({platform.machine()}) lacks what the kernels need: {'; '.join(lacks)}"
            )
        try:
            loaded = [loader.load(self._stored(entry, best)) for entry in self._entries]
        except (OSError, AttributeError, BuildError) as error:
            return self._rebuilt(loader, f"the system does not load the kernels: {error}")
        self._arch = best
        return loaded

    def in_sequence(self) -> Callable[..., int] | None:
        """Return the function that launches several kernels in one call; None without one that this machine loads."""
        entry, function = self._manifest.get("sequences"), sequence_function_of(self._manifest["target"])
        if entry is None or function is None:
            return None
        if not self._arch:
            return function.in_sequence()
        try:
            return function.function_in(self._content(entry["objects"][self._arch]))
        except (OSError, AttributeError, BuildError):
            return None

    def _rebuilt(self, loader: Loader, reason: str) -> list[Callable[..., None]]:
        try:
            launchers = [loader.rebuild(self._stored(entry)) for entry in self._entries]
        except BuildError as error:
            raise ArtifactError(
                f"{reason}; and they cannot be compiled here: {error.message}",
                hint="install a C compiler, or save the program for this architecture (arch=…)",
            ) from error
        self._notes.append(f"{reason}; compiled again from source")
        return launchers

    def _stored(self, entry: ArtifactKernel, arch: str = "") -> Stored:
        """Return a kernel with its object for an architecture, or without one."""
        carried = entry.get("carried", {}).get(arch)
        return Stored(
            Callee(entry["name"], entry["function"], entry["tensors"], entry["sizes"]),
            self._content(entry["source"]).decode(),
            partial(_kernel, self._content(entry["kernel"]).decode() if "kernel" in entry else ""),
            self._failed(entry),
            self._content(entry["objects"][arch]) if arch else b"",
            self._content(carried) if carried else b"",
            entry.get("launch", {}),
        )

    def _content(self, member: str) -> bytes:
        return _bytes(self._members[member])

    def _failed(self, entry: ArtifactKernel) -> Callable[[Arguments], Exception]:
        return partial(_failure, self._content(entry["kernel"]).decode() if "kernel" in entry else "")


class Reader(Protocol):
    """Reads kernels from their text, as `kernels.py` does."""

    def failure_of(self, text: str, args: Arguments) -> Exception:
        """Return the error to raise after a launch in which a check of the kernel failed."""

    def kernel_of(self, text: str) -> object:
        """Return the kernel that a text describes."""


def _reader() -> Reader:
    """Load the IRs, which artifacts need only to read a kernel from its text."""
    return cast(Reader, import_module("fusion.artifact.kernels"))


def _failure(kernel: str, args: Arguments) -> Exception:
    return _reader().failure_of(kernel, args)


def _kernel(text: str) -> object:
    return _reader().kernel_of(text)


def _bytes(content: torch.Tensor) -> bytes:
    return bytes(bytes_of(content))


def _tensors(file: Path, manifest: Manifest, members: Members, given: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a program, in their layouts, by their names in the files that hold them.

    Raises:
        ArtifactError: one is missing, or does not fit.
    """
    kept = tensors_in(members[CONSTANTS]) if CONSTANTS in members else {}
    own = _weights(file, manifest, members, given)
    held: dict[str, torch.Tensor] = {}
    device = torch.device("cpu") if manifest["device"] == "cpu" else torch.device(manifest["device"], 0)
    for name, entry in manifest["tensors"].items():
        source = own if entry["state"] or name in own else kept
        if name not in source:
            raise ArtifactError(f"the weights have no {name}")
        dtype = read(entry["dtype"])
        assert isinstance(dtype, torch.dtype)
        weight = torch.empty_strided(entry["shape"], entry["strides"], dtype=dtype, device="meta")
        refuse_other(name, source[name], weight)
        held[name] = _in_layout(source[name], entry["strides"], device, copied=isinstance(given, Mapping))
    return held


def _in_layout(value: torch.Tensor, strides: Sequence[int], device: torch.device, *, copied: bool) -> torch.Tensor:
    value = value.detach()
    if value.device == device and [*value.stride()] == [*strides] and not copied:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=device).copy_(value)


def _weights(file: Path, manifest: Manifest, members: Members, given: object) -> Mapping[str, torch.Tensor]:
    if isinstance(given, Mapping):
        return _by_tensor(manifest, given)
    if given is not None:
        return _by_tensor(manifest, tensors_in(content_of(Path(os.fspath(given)))))  # type: ignore[call-overload]  # a path
    if WEIGHTS in members:
        return tensors_in(members[WEIGHTS])
    if (reference := manifest.get("weights_file")) is None:
        return {}
    beside = file.parent / Path(reference["name"]).name
    content = content_of(beside)
    if sha256(bytes_of(content)).hexdigest() != reference["sha256"]:
        raise ArtifactError(
            f"{beside} is not the file that {file} was saved with", hint="to use it all the same, pass weights=…"
        )
    return tensors_in(content)


def _by_tensor(manifest: Manifest, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return given weights under the name that each is stored under: the first, for tied ones."""
    return {tensor: given[name] for name, tensor in manifest["state"].items() if name in given}


__all__ = ["CONSTANTS", "FORMAT", "STEPS", "WEIGHTS", "load"]
