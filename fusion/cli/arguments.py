"""Defines the arguments of every command, with examples.  Neither PyTorch nor the compiler is imported here."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

TARGETS = ("c", "reference", "triton")
"""The names in `fusion.codegen.targets`, repeated here because importing them would load PyTorch."""

EXIT_CODES = """exit codes:
  0  success
  1  the command ran, and its result is bad: results differ, a check fails, nothing was generated
  2  the command could not run: wrong arguments, a program that fails, no such device
  130  it was interrupted"""

PROGRAM = """FILE.py:NAME or package.module:NAME names a function, a module (nn.Module) or a module class, which is
instantiated without arguments; FILE.pt2 holds a program saved by torch.export.save.  Inputs are random, of the given
shapes; an exported program gets the inputs that it was exported with if none are given."""

KWARG = """a keyword argument: a shape in brackets for a random tensor, with a dtype if it is not float32, or else a
Python value: --kwarg mask=[8,128]:bool --kwarg scale=0.5 --kwarg causal=True"""

OPTIONS = "options of fusion.fuse, as key=value: --option numerics=strict --option workspace=1000000"


def command(commands: Commands, name: str, description: str, examples: str, *, module: str) -> argparse.ArgumentParser:
    """Add a command that the function `name` of a module of this package implements."""
    lines = "\n".join(f"  fusion {line}" for line in examples.strip().splitlines())
    parser = commands.add_parser(
        name,
        help=description,
        description=f"{description[0].upper()}{description[1:]}.",
        epilog=f"examples:\n{lines}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(module=module, command=name)
    return parser


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the program and its inputs."""
    parser.add_argument("program", metavar="FILE.py:NAME", help=PROGRAM)
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="8,128",
        help="shape of an input; once per input; '' for a scalar",
    )
    parser.add_argument(
        "--dtype", action="append", default=[], metavar="float32", help="one for all inputs, or one per input"
    )
    parser.add_argument("--kwarg", action="append", default=[], metavar="NAME=VALUE", help=KWARG)
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--seed", type=seed, default=0, help="of the random inputs")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add how the program is compiled and run."""
    parser.add_argument("--train", action="store_true", help="also run backward; inputs of floats require gradients")
    parser.add_argument("--mode", metavar="MODE", help="default, reduce-overhead or max-autotune")
    parser.add_argument("--dynamic", action="store_true", help="compile once for all sizes")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add options of `fusion.fuse`."""
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help=OPTIONS)


def add_tolerances(parser: argparse.ArgumentParser) -> None:
    """Add the tolerances of a comparison."""
    parser.add_argument(
        "--rtol", type=tolerance, metavar="1e-3", help="relative to the reference; default: twice eager's own error"
    )
    parser.add_argument("--atol", type=tolerance, metavar="1e-5", help="absolute; 0 where only --rtol is given")
    parser.add_argument(
        "--against", choices=("eager", "float64"), default="eager", help="the reference of --rtol and --atol"
    )


def add_target(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add for which target kernels are generated ahead of time."""
    shown = "" if default is None else f"; default: {default}"
    parser.add_argument(
        "--target", choices=TARGETS, default=default, help=f"generate for it ahead of time; needs no device{shown}"
    )
    parser.add_argument("--arch", metavar="sm_90", help="the architecture that --target generates for")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the choice of JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add the choices of JSON and of a page."""
    add_json(parser)
    what = "also write the report, with the outcome of the command, as a page for a browser"
    parser.add_argument("--html", type=file, metavar="FILE", help=what)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add a device without a program."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")


def folder(text: str) -> Path:
    """Return a path of a directory that can be written; it is made if there is none."""
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a file")
    try:
        os.makedirs(text, exist_ok=True)
        writable = os.access(text, os.W_OK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {reason}") from error
    if not writable:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return Path(text)


def file(text: str) -> Path:
    """Return a path of a file that may be written: it is no directory, and lies in one."""
    path = Path(text)
    if not text or os.path.isdir(text):  # which is False, and does not fail, for names that are too long
        raise argparse.ArgumentTypeError(f"{text!r} is no file")
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: there is no directory {path.parent}")
    return path


def seed(text: str) -> int:
    """Return a seed that PyTorch takes, as does the number after it."""
    number = int(_number(text, int))
    if abs(number) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is no seed: it must have fewer than 64 bits")
    return number


def tolerance(text: str) -> float:
    """Return a number that is not negative."""
    number = _number(text, float)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no tolerance: it must be a number from 0 on")
    return number


def rounds(text: str) -> int:
    """Return a whole number from 2 on: one round has no quartiles."""
    number = int(_number(text, int))
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} must be at least 2")
    return number


def _number(text: str, kind: Callable[[str], float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
