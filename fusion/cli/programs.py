"""Loads the program that a command names, draws its inputs, and reads its settings.

Input: the parsed arguments; output: a callable, tensors, and the keyword arguments of `fusion.fuse`.  Where any of them
cannot be loaded, drawn or read, a `CommandError` is raised before the command prints anything.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import torch
from torch.utils import _pytree as pytree

from fusion.lowering.errors import FusionError, Origin, brief
from fusion.lowering.printer import format_bytes
from fusion.options import SWITCHES, Options

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


EXPORTED = ".pt2"
"""The end of the name of a file that holds an exported program."""


class CommandError(FusionError):
    """The command cannot run with these arguments."""


class Settings(TypedDict):
    """The keyword arguments of `fusion.fuse` that a command line can give."""

    mode: str | None
    dynamic: bool | None
    options: dict[str, object]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that runs on its inputs, and how it is to be compiled."""

    program: Callable[..., object]
    inputs: list[object]
    kwargs: dict[str, object]
    settings: Settings

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors among its inputs."""
        return [each for each in pytree.tree_leaves((self.inputs, self.kwargs)) if isinstance(each, torch.Tensor)]


def prepared(arguments: argparse.Namespace) -> Prepared:
    """Return the program with its inputs, after one eager run to check that they fit.

    Raises:
        CommandError: there is no such program, or it fails on these inputs; a setting is unknown.
    """
    settings = settings_of(arguments)
    program, given = load_program(arguments.program), _exported_inputs(arguments)
    inputs, kwargs = given if given is not None else (list[object](make_inputs(arguments)), make_kwargs(arguments))
    try:
        program(*inputs, **kwargs)
    except (Exception, SystemExit) as error:
        shapes = ", ".join(map(_described, (*inputs, *kwargs.values()))) or "no inputs"
        raise CommandError(
            f"the program {_failed(error, f'failed on {shapes}')}",
            hint="give one --shape per input, in order, and --dtype where float32 is wrong",
            origin=_origin(error),
        ) from error
    return Prepared(program, inputs, kwargs, settings)


def _described(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)


# Settings -------------------------------------------------------------------------------------------------------------


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the keyword arguments of `fusion.fuse` that the arguments ask for.

    Raises:
        CommandError: an option is unknown, or has a value that it does not take.
    """
    options = dict(_option(text) for text in arguments.option)
    if getattr(arguments, "dump", None) is not None:
        options["dump"] = arguments.dump
    try:
        Options.read(arguments.mode, options)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error), hint="`fusion explain --help` has examples") from error
    return {"mode": arguments.mode, "dynamic": True if arguments.dynamic else None, "options": options}


def _option(text: str) -> tuple[str, object]:
    """Parse `key=value`, by the type of the option.

    >>> _option("workspace=5"), _option("strict=yes"), _option("numerics=strict"), _option("target=none")
    (('workspace', 5), ('strict', True), ('numerics', 'strict'), ('target', None))
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise CommandError(f"{text!r} is no option", hint="write key=value, for example --option numerics=strict")
    kind = {each.name: str(each.type) for each in fields(Options)}.get(key, "str")
    word = value.strip().lower()
    if kind == "bool" and word in SWITCHES:
        return key, SWITCHES[word]
    if kind == "int" and word.removeprefix("-").isdecimal():
        return key, int(word)
    return key, None if kind.endswith("None") and word == "none" else value


# Programs -------------------------------------------------------------------------------------------------------------


def load_program(spec: str) -> Callable[..., object]:
    """Return the function or module that `FILE.py:NAME` or `package.module:NAME` names.

    A module class is instantiated without arguments.

    Raises:
        CommandError: no such file, module or name, or importing it fails.
    """
    if spec.endswith(EXPORTED):
        return _exported(spec).module()
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        hint = "write FILE.py:NAME or package.module:NAME, for example model.py:forward"
        raise CommandError(f"{spec!r} names no program", hint=hint)
    module = _file(place) if _is_file(place) else _module(place)
    program = getattr(module, name, None)
    if not callable(program):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = f"it has: {', '.join(names)}" if names else "it has no functions and modules"
        if program is None:
            raise CommandError(f"{place} has nothing called {name!r}", hint=hint)
        kind = type(program).__name__
        raise CommandError(f"{name!r} in {place} is of the type {kind}, which cannot be run", hint=hint)
    return _instance(program, spec) if isinstance(program, type) else program


@cache
def _exported(file: str) -> torch.export.ExportedProgram:
    """Load a program that `torch.export.save` saved."""
    _check_file(file)
    log = logging.getLogger("torch.export")  # it prints a traceback of its own
    before, log.disabled = log.disabled, True
    try:
        return torch.export.load(file)
    except Exception as error:  # whatever a damaged file makes PyTorch raise
        message = f"{file} is no exported program: {type(error).__name__}: {brief(error)}"
        raise CommandError(message, hint="save one with torch.export.save, of the PyTorch that runs here") from error
    finally:
        log.disabled = before


def _exported_inputs(arguments: argparse.Namespace) -> tuple[list[object], dict[str, object]] | None:
    """Return the example inputs of an exported program; None for others, and where shapes are given."""
    if not arguments.program.endswith(EXPORTED) or arguments.shape or arguments.kwarg:
        return None
    example = _exported(arguments.program).example_inputs
    if example is None:
        return None
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda each: _placed(each.detach(), arguments), example)
    return list(args), dict(kwargs)


def _is_file(place: str) -> bool:
    """Return whether a text is meant as a path, and not as the name of a module."""
    return Path(place).exists() or place.endswith(".py") or not all(part.isidentifier() for part in place.split("."))


def _check_file(file: str) -> None:
    if Path(file).is_dir():
        raise CommandError(f"{file!r} is a directory", hint="write FILE.py:NAME, or the name of a .pt2 file")
    if not Path(file).is_file():
        raise CommandError(f"there is no file {file!r}", hint=f"looked in {Path.cwd()}")


def _file(file: str) -> ModuleType:
    _check_file(file)
    path = Path(file)
    source = importlib.util.spec_from_file_location(path.stem, path)
    if source is None or source.loader is None:
        raise CommandError(f"{file!r} is no Python file", hint="its name must end in .py")
    module = importlib.util.module_from_spec(source)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # modules that the file imports may be in its directory
    return _imported(file, partial(_executed, source.loader, module))


def _executed(loader: Loader, module: ModuleType) -> ModuleType:
    loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return _imported(name, lambda: importlib.import_module(name))


def _imported(name: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:
        missing = (
            isinstance(error, ModuleNotFoundError) and error.name is not None and f"{name}.".startswith(error.name)
        )
        if missing:
            raise CommandError(f"there is no module {name!r}", hint=f"looked in {Path.cwd()} and sys.path") from error
        message = f"{name} {_failed(error, 'cannot be imported')}"
        raise CommandError(message, hint="it is run as Python runs it", origin=_origin(error)) from error


def _instance(kind: type, spec: str) -> Callable[..., object]:
    """Return an instance of the class that `spec` names."""
    hint = "a class must be an nn.Module that takes no arguments; else name an instance or a function"
    try:
        instance: object = kind()
    except (Exception, SystemExit) as error:
        message = f"{spec} {_failed(error, 'cannot be instantiated')}"
        raise CommandError(message, hint=hint, origin=_origin(error)) from error
    if not callable(instance):
        raise CommandError(f"an instance of {spec} cannot be called", hint=hint)
    return instance


def _failed(error: BaseException, how: str) -> str:
    """Return a message: the exception of a program, or the exit code with which it ended the process."""
    if isinstance(error, SystemExit):
        return f"{how}: it ends the process, with exit code {0 if error.code is None else error.code}"
    return f"{how}: {type(error).__name__}: {brief(error)}"


def _origin(error: BaseException) -> Origin | None:
    """Return the innermost line outside PyTorch and this file in the traceback of `error`."""
    within = os.path.dirname(torch.__file__) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith((within, "<"))]
    return Origin(own[-1].name, line=f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}") if own else None


# Inputs ---------------------------------------------------------------------------------------------------------------


def make_inputs(arguments: argparse.Namespace) -> list[torch.Tensor]:
    """Return random inputs of the given shapes and dtypes: normal, or integers in [0, 8), or booleans.

    Raises:
        CommandError: a shape or dtype that cannot be parsed, or that no memory is left for; no such device.
    """
    shapes = [_shape(text) for text in arguments.shape]
    names: list[str] = arguments.dtype or ["float32"]
    if len(names) == 1:
        names = names * len(shapes)
    if len(names) != len(shapes):
        message = f"{len(names)} times --dtype for {len(shapes)} times --shape"
        raise CommandError(message, hint="give one --dtype, or one per --shape")
    pairs = [(shape, _dtype(name)) for shape, name in zip(shapes, names, strict=True)]
    generator = torch.Generator().manual_seed(arguments.seed)
    return [_placed(tensor, arguments) for tensor in _drawn(pairs, generator)]


def _drawn(pairs: Sequence[tuple[tuple[int, ...], torch.dtype]], generator: torch.Generator) -> list[torch.Tensor]:
    """Draw tensors in memory.

    Raises:
        CommandError: no memory is left for them.
    """
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)
    if size > (memory := _memory()):
        raise _too_large(size, f"this machine has {format_bytes(memory)}")
    if any(math.prod(max(1, extent) for extent in shape) >= 1 << 63 for shape, _ in pairs):
        raise _too_large(size, "their strides take more than 63 bits")
    try:
        return [_random(shape, dtype, generator) for shape, dtype in pairs]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise _too_large(size, brief(error)) from error


def _placed(tensor: torch.Tensor, arguments: argparse.Namespace) -> torch.Tensor:
    """Return a tensor on the device, and with a gradient where backward is asked for.

    Raises:
        CommandError: no such device.
    """
    try:
        placed = tensor.to(arguments.device)
    except torch.OutOfMemoryError as error:
        raise _too_large(tensor.nbytes, brief(error)) from error
    except (RuntimeError, AssertionError) as error:  # PyTorch asserts that it was built with CUDA
        message = f"the device {arguments.device!r} cannot be used: {brief(error)}"
        raise CommandError(message, hint="`fusion kernels --target triton` needs no GPU") from error
    return placed.requires_grad_(getattr(arguments, "train", False) and placed.is_floating_point())


def make_kwargs(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the keyword arguments: random tensors of shapes in brackets, and Python values.

    Raises:
        CommandError: one cannot be read.
    """
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    given: dict[str, object] = {}
    for text in arguments.kwarg:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            hint = "write NAME=VALUE, for example --kwarg scale=0.5 or --kwarg mask=[8,128]:bool"
            raise CommandError(f"{text!r} is no keyword argument", hint=hint)
        shape, _, dtype = value.partition(":")
        if shape.startswith("[") and shape.endswith("]"):
            drawn = [(_shape(shape[1:-1]), _dtype(dtype or "float32"))]
            given[name] = _placed(_drawn(drawn, generator)[0], arguments)
        else:
            given[name] = _literal(name, value)
    return given


def _literal(name: str, value: str) -> object:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        hint = "a Python value (0.5, True, 'text'), or a shape: [8,128]"
        raise CommandError(f"{value!r}, of {name}, is no value", hint=hint) from error


def _memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _too_large(size: int, reason: str) -> CommandError:
    message = f"the inputs take {format_bytes(size)}, which cannot be allocated: {reason}"
    return CommandError(message, hint="give smaller sizes to --shape")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise CommandError(f"{text!r} is no shape", hint="sizes with commas between them, for example --shape 8,128")
    return shape


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise CommandError(f"unknown dtype {name!r}", hint=f"known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 8, shape, generator=generator).to(dtype)
