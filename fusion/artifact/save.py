"""Saves a compiled program as one file.

Input: a program and example inputs, of which only shapes, strides, dtypes and constants matter; output: an archive with
a manifest, the steps of the program, its kernels as source and compiled, and its weights.  Inference only: a program is
saved in the state (train or eval) that it is in, and computes no gradients.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import fusion
from fusion.api import options_for
from fusion.artifact.ahead import CompiledGraph, compiled
from fusion.artifact.capture import CapturedProgram, captured
from fusion.artifact.container import pack
from fusion.artifact.functions import schema_of
from fusion.artifact.kernels import checked_text, text_of
from fusion.artifact.load import CONSTANTS, FORMAT, STEPS, WEIGHTS
from fusion.artifact.manifest import ArtifactKernel, Manifest, SequenceObjects, TensorEntry, WeightEntry
from fusion.artifact.move_device import moved
from fusion.artifact.planned_sequences import in_sequences
from fusion.artifact.record import Recording, recorded
from fusion.artifact.signature import ProgramSignature
from fusion.artifact.state import identity, refuse_shared_memory, written_beside
from fusion.artifact.weights import pieces
from fusion.codegen.binary import Binary, sequence_function_of
from fusion.codegen.target import Target
from fusion.codegen.targets import DEFAULTS, TARGETS
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.kernel import Kernel
from fusion.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.export import ExportedProgram

Content = Iterable["bytes | memoryview"]

SEQUENCE = "sequence"
"""The stem of the members with the function that launches several kernels."""


def save(
    program: Callable[..., object] | ExportedProgram,
    path: str | os.PathLike[str],
    *,
    inputs: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    dynamic_shapes: object = None,
    device: str | torch.device | None = None,
    arch: str | Sequence[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Compile a program, and write it with all that another process needs to run it (`fusion.load`).

    Args:
        program: an `nn.Module` or a function, fused or not, or the result of `torch.export.export`.
        path: the file; an existing file is replaced.
        inputs: example arguments; only their shapes, strides and dtypes matter, and values that are no tensors.
        kwargs: example arguments by keyword.
        dynamic_shapes: which sizes vary, as for `torch.export.export`.
        device: the device that it will run on, "cpu" or "cuda"; by default the device of its tensors.
        arch: the architectures to compile kernels for.  On CPUs "native" (the CPU at hand), which is the default, and
            "x86-64-v2", "x86-64-v3" or "x86-64-v4"; on GPUs one, such as "sm_90".  The hardware need not be present.
        weights: a file of safetensors beside `path` that holds the parameters and buffers; it is written if there is
            none.  By default they are in the file itself.
        options: as for `fusion.fuse`; by default the options with which `program` was fused.

    Raises:
        TypeError: `program` cannot be called, or `inputs` is no sequence.
        Unsupported: the program, or a part of it, is not saved: the message names it.
        FusionError: it cannot be compiled.
        OSError: the file cannot be written.
    """
    chosen = options_for(program, options)
    whole = captured(program, inputs, kwargs or {}, dynamic_shapes)
    present = _device_of(whole)
    wanted = present if device is None else torch.device(device)
    whole = whole if wanted.type == present.type else moved(whole, torch.device(wanted.type, 0))
    architectures = [arch] if isinstance(arch, str) else [*(arch or [])]
    target = _target(chosen, wanted, architectures)
    _Saved(whole, compiled(whole, target, chosen), target, architectures).write(
        Path(path), None if weights is None else Path(weights)
    )


def _device_of(program: CapturedProgram) -> torch.device:
    devices = {value.device for value in program.inputs if isinstance(value, torch.Tensor)}
    if len(devices) > 1:
        raise Unsupported(f"a program on several devices is not saved: {', '.join(sorted(map(str, devices)))}")
    (device,) = devices
    return device


def _target(options: Options, device: torch.device, architectures: list[str]) -> Target:
    """Return the target for a device; fill `architectures` with its own, if they are empty.

    Raises:
        Unsupported: no target serves the device, or not for these architectures.
    """
    if device.type not in DEFAULTS:
        raise Unsupported(f"programs on {device.type} are not saved", hint=f"devices: {', '.join(sorted(DEFAULTS))}")
    numerics = options.current_numerics
    if device.type == "cpu":
        architectures[:] = architectures or ["native"]
        return TARGETS[options.target or DEFAULTS["cpu"]](None, numerics)
    if len(architectures) > 1:
        raise Unsupported("a program on a GPU is saved for one architecture: each has kernels of its own")
    target = TARGETS[options.target or DEFAULTS[device.type]](architectures[0] if architectures else None, numerics)
    architectures[:] = architectures or [target.identity.split()[0]]
    return target


class _Saved:
    """The members of a file, and its manifest."""

    def __init__(
        self, program: CapturedProgram, compilation: CompiledGraph, target: Target, architectures: Sequence[str]
    ) -> None:
        self.program, self.compilation, self.target = program, compilation, target
        self.numbers = {kernel: number for number, kernel in enumerate(compilation.sources)}
        self.sequence = sequence_function_of(target.name)
        module = compilation.module if self.sequence is None else in_sequences(compilation.module, self.numbers)
        self.recording: Recording = recorded(module, self.numbers)
        self.signature = ProgramSignature(program, compilation, self.recording.results)
        self.members: dict[str, Content] = {}
        self.members[STEPS] = [json.dumps(self.recording.steps, separators=(",", ":")).encode()]
        self.needs: dict[str, list[str]] = {}
        self.kernels = self._kernels(architectures)
        self.sequences = self._sequences(architectures)

    def _kernels(self, architectures: Sequence[str]) -> list[ArtifactKernel]:
        """Compile the kernels, and return the entry of each."""
        sources = self.compilation.sources.items()
        texts = [checked_text(kernel) for kernel, _ in sources]
        with ThreadPoolExecutor(max(1, min(len(sources), os.cpu_count() or 1)), "fusion-save") as workers:
            begun = [
                [workers.submit(self.target.binary, kernel, source, arch) for arch in architectures]
                for kernel, source in sources
            ]
            binaries = [[future.result() for future in futures] for futures in begun]
        return [
            self._kernel(kernel, text, dict(zip(architectures, compiled, strict=True)))
            for kernel, text, compiled in zip(self.compilation.sources, texts, binaries, strict=True)
        ]

    def _kernel(self, kernel: Kernel, text: str, binaries: Mapping[str, Binary]) -> ArtifactKernel:
        """Add the members of a kernel, and return its entry."""
        stem, *_, last = f"{self.numbers[kernel]}_{kernel.name}", *binaries.values()
        objects = {arch: f"objects/{arch}/{stem}.{binary.suffix}" for arch, binary in binaries.items()}
        carried = {arch: f"carried/{arch}/{stem}.json" for arch, binary in binaries.items() if binary.carried}
        entry: ArtifactKernel = {
            "source": f"sources/{stem}.{self.target.suffix}",
            "objects": objects,
            "name": last.callee.name,
            "function": last.callee.function,
            "tensors": last.callee.tensors,
            "sizes": last.callee.sizes,
        }
        self.members[entry["source"]] = [self.compilation.sources[kernel].encode()]
        if text := text or (text_of(kernel) if carried else ""):
            entry["kernel"] = f"kernels/{stem}.json"
            self.members[entry["kernel"]] = [text.encode()]
        if last.launch:
            entry["launch"] = dict(last.launch)
        if carried:
            entry["carried"] = carried
        for arch, binary in binaries.items():
            self.needs[arch] = [*binary.needs]
            self.members[objects[arch]] = [binary.content]
        self.members.update((member, [binaries[arch].carried]) for arch, member in carried.items())
        return entry

    def _sequences(self, architectures: Sequence[str]) -> SequenceObjects | None:
        """Add the members of the function that launches sequences, and return its entry; None if no step needs it."""
        if self.sequence is None or not any("sequence" in step for step in self.recording.steps):
            return None
        source = f"sources/{SEQUENCE}.{self.target.suffix}"
        objects = {arch: f"objects/{arch}/{SEQUENCE}.so" for arch in architectures}
        self.members[source] = [self.sequence.source().encode()]
        self.members.update((member, [self.sequence.object_for(arch)]) for arch, member in objects.items())
        return {"source": source, "objects": objects}

    def write(self, path: Path, beside: Path | None) -> None:
        """Write the file, and the weights beside it if they are not in it.

        Raises:
            OSError: the file system refuses.
        """
        held = _Held.of(self.program, self.recording.literals)
        refuse_shared_memory(held.registers, self.signature.changed_weights)
        manifest = self._manifest(held)
        if held.others:
            self.members[CONSTANTS] = pieces(held.others)
        if self.sequences is not None:
            manifest["sequences"] = self.sequences
        if beside is None:
            self.members[WEIGHTS] = pieces(held.state)
        else:
            manifest["weights_file"] = {"name": beside.name, "sha256": written_beside(path, beside, held.state)}
        pack(path, manifest, self.members)

    def _manifest(self, held: _Held) -> Manifest:
        return {
            "format": FORMAT,
            "name": self.program.name,
            "fusion": fusion.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "target": self.target.name,
            "device": self.compilation.device.type,
            "architectures": self.needs,
            "registers": self.recording.registers,
            "arguments": self.signature.arguments(),
            "results": self.signature.results(),
            "operations": {name: schema_of(name) for name in sorted(self.recording.operations)},
            "kernels": self.kernels,
            "weights": held.entries,
            "changed_weights": self.signature.changed_weights,
            "state": held.names,
            "tensors": {
                **{name: _described(tensor, state=True) for name, tensor in held.state.items()},
                **{name: _described(tensor, state=False) for name, tensor in held.others.items()},
            },
        }


@dataclass(slots=True)
class _Held:
    """The tensors that a program holds, each stored once.

    Attributes:
        registers: the name, the register and the value of each that the program reads.
        entries: the manifest's entries about these.
        names: all names of the state, also of tensors that the graph does not read (tied ones, unused ones) → the name
            under which the tensor is stored.
        state, others: the stored tensors of the state, and the tensors that are part of the program.
    """

    registers: list[tuple[str, int, torch.Tensor]] = field(default_factory=list)
    entries: list[WeightEntry] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, program: CapturedProgram, literals: Mapping[int, torch.Tensor]) -> _Held:
        """Return the tensors of a program; `literals` are those in its graph, by register."""
        held = cls()
        first: dict[tuple[object, ...], str] = {}
        read = [(weight.name, weight.kind, k, weight.tensor) for k, weight in enumerate(program.weights)]
        read += [(f"literal {k}", "constant", k, tensor) for k, tensor in literals.items()]
        for name, kind, register, tensor in read:
            stored = first.setdefault(identity(tensor), name)
            if stored == name:
                (held.others if kind == "constant" else held.state)[name] = tensor
            held.registers.append((name, register, tensor))
            held.entries.append({"register": register, "tensor": stored, "name": name, "kind": kind})
        for name, tensor in program.exported.state_dict.items():
            held.names[name] = stored = first.setdefault(identity(tensor), name)
            if stored not in held.others:
                held.state.setdefault(stored, tensor.detach())
        return held


def _described(tensor: torch.Tensor, *, state: bool) -> TensorEntry:
    strides = [*tensor.stride()]
    return {"state": state, "dtype": {"torch": str(tensor.dtype)}, "shape": [*tensor.shape], "strides": strides}


__all__ = ["save"]
