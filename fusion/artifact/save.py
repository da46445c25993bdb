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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import fusion
from fusion.api import options_for
from fusion.artifact.ahead import Compiled, compiled
from fusion.artifact.capture import Captured, captured
from fusion.artifact.container import pack
from fusion.artifact.elsewhere import moved
from fusion.artifact.functions import schema_of
from fusion.artifact.kernels import checked_text, text_of
from fusion.artifact.load import CONSTANTS, FORMAT, STEPS, WEIGHTS
from fusion.artifact.record import Recording, recorded
from fusion.artifact.signature import Signature
from fusion.artifact.state import identity, refuse_shared_memory, written_beside
from fusion.artifact.values import Json
from fusion.artifact.weights import pieces
from fusion.codegen.binary import Binary
from fusion.codegen.target import Target
from fusion.codegen.targets import DEFAULTS, TARGETS
from fusion.lowering.errors import Unsupported
from fusion.lowering.kernel import Kernel
from fusion.options import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.export import ExportedProgram

Content = Iterable["bytes | memoryview"]


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
        path: the file; one that exists is replaced.
        inputs: example arguments; only their shapes, strides and dtypes matter, and values that are no tensors.
        kwargs: example arguments by keyword.
        dynamic_shapes: which sizes vary, as for `torch.export.export`.
        device: the device that it will run on, "cpu" or "cuda"; by default the one that its tensors are on.
        arch: the architectures to compile kernels for.  On CPUs "native" (the CPU at hand), which is the default, and
            "x86-64-v2", "x86-64-v3" or "x86-64-v4"; on GPUs one, such as "sm_90".  The hardware need not be present.
        weights: a file of safetensors beside `path` that holds the parameters and buffers; it is written if there is
            none.  By default they are in the file itself.
        options: as for `fusion.fuse`; by default those that `program` was fused with.

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


def _device_of(program: Captured) -> torch.device:
    devices = {value.device for value in program.inputs if isinstance(value, torch.Tensor)}
    if len(devices) > 1:
        raise Unsupported(f"a program on several devices is not saved: {', '.join(sorted(map(str, devices)))}")
    (device,) = devices
    return device


def _target(options: Options, device: torch.device, architectures: list[str]) -> Target:
    """Return the target for a device; `architectures` becomes those that are compiled for.

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

    def __init__(self, program: Captured, made: Compiled, target: Target, architectures: Sequence[str]) -> None:
        self.program, self.made, self.target = program, made, target
        self.kernels = {kernel: number for number, kernel in enumerate(made.sources)}
        self.recording: Recording = recorded(made.module, self.kernels)
        self.signature = Signature(program, made, self.recording.results)
        self.members: dict[str, Content] = {}
        self.manifest: dict[str, Json] = {
            "format": FORMAT,
            "name": program.name,
            "fusion": fusion.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "target": target.name,
            "device": made.device.type,
            "architectures": {},
            "registers": self.recording.registers,
            "arguments": self.signature.arguments(),
            "results": self.signature.results(),
            "operations": {name: schema_of(name) for name in sorted(self.recording.operations)},
        }
        self.members[STEPS] = [json.dumps(self.recording.steps, separators=(",", ":")).encode()]
        self._add_kernels(architectures)

    def _add_kernels(self, architectures: Sequence[str]) -> None:
        sources = self.made.sources.items()
        entries = [self._add_source(number, *each) for number, each in enumerate(sources)]
        with ThreadPoolExecutor(max(1, min(len(sources), os.cpu_count() or 1)), "fusion-save") as workers:
            for arch in architectures:
                begun = [workers.submit(self.target.binary, kernel, source, arch) for kernel, source in sources]
                for kernel, entry, future in zip(self.made.sources, entries, begun, strict=True):
                    self._add_object(kernel, entry, arch, future.result())
        self.manifest["kernels"] = entries

    def _add_source(self, number: int, kernel: Kernel, source: str) -> dict[str, Json]:
        entry: dict[str, Json] = {"source": f"sources/{number}_{kernel.name}.{self.target.suffix}", "objects": {}}
        self.members[entry["source"]] = [source.encode()]
        self._add_kernel(kernel, entry, checked_text(kernel))
        return entry

    def _add_kernel(self, kernel: Kernel, entry: dict[str, Json], text: str) -> None:
        if text and "kernel" not in entry:
            entry["kernel"] = f"kernels/{self.kernels[kernel]}_{kernel.name}.json"
            self.members[entry["kernel"]] = [text.encode()]

    def _add_object(self, kernel: Kernel, entry: dict[str, Json], arch: str, binary: Binary) -> None:
        member = f"objects/{arch}/{Path(entry['source']).stem}.{binary.suffix}"
        entry.update(asdict(binary.callee), **({"launch": dict(binary.launch)} if binary.launch else {}))
        entry["objects"][arch] = member
        self.manifest["architectures"][arch] = [*binary.needs]
        self.members[member] = [binary.content]
        if binary.carried:
            self._add_kernel(kernel, entry, text_of(kernel))
            carried = f"carried/{arch}/{Path(entry['source']).stem}.json"
            entry.setdefault("carried", {})[arch] = carried
            self.members[carried] = [binary.carried]

    def write(self, path: Path, beside: Path | None) -> None:
        """Write the file, and the weights beside it if they are not in it.

        Raises:
            OSError: the file system refuses.
        """
        state, others = self._tensors()
        if others:
            self.members[CONSTANTS] = pieces(others)
        if beside is None:
            self.members[WEIGHTS] = pieces(state)
        else:
            self.manifest["weights_file"] = {"name": beside.name, "sha256": written_beside(path, beside, state)}
        pack(path, self.manifest, self.members)

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensors of the state, and those that are part of the program; each is written once."""
        first: dict[tuple[object, ...], str] = {}
        state: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        entries: list[Json] = []
        held = [(weight.name, weight.kind, k, weight.tensor) for k, weight in enumerate(self.program.weights)]
        held += [(f"literal {k}", "constant", k, tensor) for k, tensor in self.recording.literals.items()]
        for name, kind, register, tensor in held:
            stored = first.setdefault(identity(tensor), name)
            if stored == name:
                (others if kind == "constant" else state)[name] = tensor
            entries.append({"register": register, "tensor": stored, "name": name, "kind": kind})
        names = self._state_names(first)
        for stored, tensor in names.values():
            if stored not in others:
                state.setdefault(stored, tensor)
        self.manifest["weights"] = entries
        self.manifest["changed_weights"] = self.signature.changed_weights
        self.manifest["state"] = {name: stored for name, (stored, _) in names.items()}
        self.manifest["tensors"] = {
            **{name: _described(tensor, state=True) for name, tensor in state.items()},
            **{name: _described(tensor, state=False) for name, tensor in others.items()},
        }
        refuse_shared_memory(
            [(name, register, tensor) for name, _, register, tensor in held], self.signature.changed_weights
        )
        return state, others

    def _state_names(self, first: dict[tuple[object, ...], str]) -> dict[str, tuple[str, torch.Tensor]]:
        """Return all names of the state, also those that the graph does not read: tied ones, unused ones."""
        names = {}
        for name, tensor in self.program.exported.state_dict.items():
            names[name] = first.setdefault(identity(tensor), name), tensor.detach()
        return names


def _described(tensor: torch.Tensor, *, state: bool) -> Json:
    strides = [*tensor.stride()]
    return {"state": state, "dtype": {"torch": str(tensor.dtype)}, "shape": [*tensor.shape], "strides": strides}


__all__ = ["save"]
