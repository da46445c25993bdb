"""Parses the command line: `fusion demo`, `explain FILE.py:NAME`, `kernels FILE.py:NAME`, `calibrate`, `cache`.

Input: the arguments; output: text on standard output and an exit code: 0 for success, 1 if the command ran with a bad
result (the demo's error is too large, nothing was generated), 2 if it could not run.  An error is one message and one
hint on standard error, never a traceback.

Neither PyTorch nor the compiler is loaded before a command needs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import fusion
from fusion.lowering.errors import FusionError

TARGETS = ("c", "reference", "triton")
"""The names in `fusion.codegen.targets`, repeated here because importing them would load PyTorch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (`sys.argv` where `argv` is None) and return the exit code."""
    arguments = _parser().parse_args(argv)
    from fusion.cli import commands  # PyTorch and the compiler, once needed

    command: Callable[[argparse.Namespace], int] = getattr(commands, arguments.command)
    try:
        return command(arguments)
    except FusionError as error:
        print(f"fusion: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `fusion kernels … | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusion", description="A graph-level fusion compiler for PyTorch programs.")
    parser.add_argument("--version", action="version", version=f"fusion {fusion.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="compile GPT-2, compare it with eager, show what was fused")
    demo.add_argument("--quick", action="store_true", help="a small GPT-2 and 64 tokens, for trying it out")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    demo.add_argument("--dump", type=_folder, default=Path("fusion-dump"), metavar="DIR", help="default: ./fusion-dump")
    demo.set_defaults(command="demo")

    explain = commands.add_parser("explain", help="show the kernels of a program, and what was not fused and why")
    _program_arguments(explain)
    explain.add_argument("--dump", type=_folder, metavar="DIR", help="write every stage of the compilation below DIR")
    explain.add_argument("--times", action="store_true", help="also show the time of each pass of the compilation")
    explain.add_argument("--measure", action="store_true", help="also measure each kernel, beside its predicted time")
    explain.add_argument("--html", type=Path, metavar="FILE", help="also write the report as a page for a browser")
    explain.set_defaults(command="explain")

    accuracy = commands.add_parser("accuracy", help="compare each kernel of a program with float64")
    _program_arguments(accuracy)
    accuracy.set_defaults(command="accuracy")

    kernels = commands.add_parser("kernels", help="print the sources generated for a program")
    _program_arguments(kernels)
    kernels.add_argument("--target", choices=TARGETS, help="generate for it ahead of time; needs no device")
    kernels.set_defaults(command="kernels")

    calibrate = commands.add_parser("calibrate", help="measure this machine, so that predicted times are its own")
    calibrate.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    calibrate.set_defaults(command="calibrate")

    cache = commands.add_parser("cache", help="show what the cache directory holds, and clear it")
    cache.add_argument("--clear", action="store_true", help="remove all that was kept there")
    cache.set_defaults(command="cache")
    return parser


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file")
    return path


def _program_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", metavar="FILE.py:NAME", help="a function, a module, or a module class")
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
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
