"""Implements the commands of the command line, and loads their programs and inputs.

Input: the parsed arguments; output: text on standard output and an exit code.  A command that cannot run raises
`CommandError`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import fusion
from fusion.calibrate import calibrate as measured_speeds
from fusion.calibrate import lines
from fusion.codegen.cache import FOLDERS, cache_dir, clear, kept
from fusion.dumped.trace import passes_text
from fusion.lowering.errors import FusionError, Origin, brief
from fusion.lowering.printer import format_bytes

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class CommandError(FusionError):
    """The command cannot run with these arguments."""


def demo(arguments: argparse.Namespace) -> int:
    """Compile GPT-2, compare it with eager, show what was fused."""
    from fusion.cli.demo import run  # it needs transformers, unlike the other commands

    return run(quick=arguments.quick, device=arguments.device, dump=arguments.dump)


@torch.no_grad()
def explain(arguments: argparse.Namespace) -> int:
    """Print the kernels of a program and the edges that were not fused; on request also times, dumps and a page."""
    program, inputs = _prepared(arguments)
    options = {} if arguments.dump is None else {"dump": arguments.dump}
    explanation = fusion.explain(program, measure=arguments.measure, options=options)(*inputs)
    print(explanation)
    for graph in explanation.graphs if arguments.times else ():
        print(f"\ncompilation of {graph.label}:\n{passes_text(graph.passes)}")
    if arguments.dump is not None:
        print(f"\nEvery stage is in {arguments.dump}; read each folder from 00_ to 99_.")
    if arguments.html is not None:
        try:
            print(f"\nThe page is in {explanation.html(arguments.html)}.")
        except OSError as error:
            message = f"{arguments.html} cannot be written: {error.strerror}"
            raise CommandError(message, hint="name a file in a directory that can be written") from error
    return 0


@torch.no_grad()
def accuracy(arguments: argparse.Namespace) -> int:
    """Print the error of each kernel of a program against float64."""
    program, inputs = _prepared(arguments)
    print(fusion.accuracy(program)(*inputs))
    return 0


@torch.no_grad()
def kernels(arguments: argparse.Namespace) -> int:
    """Print the sources generated for a program."""
    program, inputs = _prepared(arguments)
    if arguments.target is None:
        sources = {kernel.source: kernel.name for kernel in fusion.explain(program)(*inputs).kernels}
    else:
        exported = fusion.export_kernels(program, *inputs, target=arguments.target)
        sources = {kernel.source: kernel.name for kernel in exported.kernels}
    if not sources:
        print("fusion: no kernel was generated; `fusion explain` says why", file=sys.stderr)
        return 1
    for number, (source, name) in enumerate(sources.items(), 1):
        print(f"{'' if number == 1 else chr(10)}=== kernel {number} of {len(sources)}: {name} ===\n{source.rstrip()}")
    return 0


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure the device and print its figures, which later compilations predict with."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for line in lines(*measured_speeds(device)):
        print(line)
    return 0


def cache(arguments: argparse.Namespace) -> int:
    """Print the contents of the cache directory, and clear it if asked."""
    print(cache_dir())
    for folder, description in FOLDERS.items():
        sizes = {path: path.stat().st_size for path in kept(folder)}
        print(f"  {folder}/  {len(sizes)} kept, {format_bytes(sum(sizes.values()))}: {description}")
        if arguments.clear:
            clear(folder)
    if arguments.clear:
        print("cleared")
    return 0


# Programs and inputs ----------------------------------------------------------------------------------------


def _prepared(arguments: argparse.Namespace) -> tuple[Callable[..., object], list[torch.Tensor]]:
    """Return the program and its inputs, after one eager run to check that they fit.

    Raises:
        CommandError: there is no such program, or it fails on these inputs.
    """
    program, inputs = load_program(arguments.program), make_inputs(arguments)
    try:
        program(*inputs)
    except Exception as error:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in inputs) or "no inputs"
        raise CommandError(
            f"the program failed on {shapes}: {type(error).__name__}: {brief(error)}",
            hint="give one --shape per input, in order, and --dtype where float32 is wrong",
            origin=_origin(error),
        ) from error
    return program, inputs


def load_program(spec: str) -> Callable[..., object]:
    """Return the function or module that `FILE.py:NAME` names; a module class is instantiated without arguments.

    Raises:
        CommandError: no such file or name, or importing it fails.
    """
    file, separator, name = spec.rpartition(":")
    path = Path(file)
    if not separator or not file or not name:
        raise CommandError(f"{spec!r} names no program", hint="write FILE.py:NAME, for example model.py:forward")
    if not path.is_file():
        raise CommandError(f"there is no file {file!r}", hint=f"looked in {Path.cwd()}")
    source = importlib.util.spec_from_file_location(path.stem, path)
    if source is None or source.loader is None:
        raise CommandError(f"{file!r} is no Python file", hint="its name must end in .py")
    module = importlib.util.module_from_spec(source)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # modules that the file imports may be in its directory
    try:
        source.loader.exec_module(module)
    except Exception as error:
        message = f"{file} cannot be imported: {type(error).__name__}: {brief(error)}"
        raise CommandError(message, hint="it is run as Python runs it", origin=_origin(error)) from error
    program = getattr(module, name, None)
    if not callable(program):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        description = "has nothing" if program is None else f"has a {type(program).__name__}"
        cannot = "" if program is None else ", which cannot be run"
        raise CommandError(f"{file} {description} called {name!r}{cannot}", hint=f"it has: {', '.join(names) or '-'}")
    return _instance(program, spec) if isinstance(program, type) else program


def _instance(kind: type, spec: str) -> Callable[..., object]:
    """Return an instance of the class that `spec` names."""
    hint = "a class must be an nn.Module that takes no arguments; else name an instance or a function"
    try:
        instance: object = kind()
    except Exception as error:
        message = f"{spec} cannot be instantiated: {type(error).__name__}: {brief(error)}"
        raise CommandError(message, hint=hint, origin=_origin(error)) from error
    if not callable(instance):
        raise CommandError(f"an instance of {spec} cannot be called", hint=hint)
    return instance


def make_inputs(arguments: argparse.Namespace) -> list[torch.Tensor]:
    """Return random inputs of the given shapes and dtypes: normal, or integers in [0, 8), or booleans.

    Raises:
        CommandError: a shape or dtype that cannot be parsed.
    """
    shapes = [_shape(text) for text in arguments.shape]
    names: list[str] = arguments.dtype or ["float32"]
    if len(names) == 1:
        names = names * len(shapes)
    if len(names) != len(shapes):
        raise CommandError(f"{len(names)} dtypes for {len(shapes)} shapes", hint="give one --dtype, or one per --shape")
    generator = torch.Generator().manual_seed(arguments.seed)
    tensors = [_random(shape, name, generator) for shape, name in zip(shapes, names, strict=True)]
    try:
        return [tensor.to(arguments.device) for tensor in tensors]
    except (RuntimeError, AssertionError) as error:  # PyTorch asserts that it was built with CUDA
        message = f"the device {arguments.device!r} cannot be used: {brief(error)}"
        raise CommandError(message, hint="`fusion kernels --target triton` needs no GPU") from error


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise CommandError(f"{text!r} is no shape", hint="sizes with commas between them, for example --shape 8,128")
    return shape


def _random(shape: tuple[int, ...], name: str, generator: torch.Generator) -> torch.Tensor:
    if name not in DTYPES:
        raise CommandError(f"unknown dtype {name!r}", hint=f"known: {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 8, shape, generator=generator).to(dtype)


def _origin(error: Exception) -> Origin | None:
    """Return the innermost line outside PyTorch and this file in the traceback of `error`."""
    within = os.path.dirname(torch.__file__) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith((within, "<"))]
    return Origin(own[-1].name, line=f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}") if own else None
