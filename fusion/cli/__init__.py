"""Parses the command line, and runs the command: `fusion explain FILE.py:NAME --shape 8,128`.

Input: the arguments; output: text on standard output and an exit code: 0 for success, 1 if the command ran with a bad
result (results differ, a check fails, nothing was generated), 2 if it could not run.  An error is one message and one
hint on standard error, never a traceback.

Neither PyTorch nor the compiler is loaded before a command needs it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import fusion
from fusion.cli import arguments as add
from fusion.cli.arguments import EXIT_CODES
from fusion.lowering.errors import FusionError

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 and the number of the signal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (`sys.argv` where `argv` is None) and return the exit code."""
    arguments = parser().parse_args(argv)
    module = importlib.import_module(f"fusion.cli.{arguments.module}")  # PyTorch and the compiler, once needed
    run: Callable[[argparse.Namespace], int] = getattr(module, arguments.command)
    try:
        return run(arguments)
    except FusionError as error:
        print(f"fusion: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `fusion kernels … | head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("fusion: interrupted", file=sys.stderr)
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Reports a parse error as commands report errors, by a message and a hint, without the full usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fusion: error: {message}\n  hint: `{self.prog} --help` has the arguments, with examples\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    whole: argparse.ArgumentParser = _Parser(
        prog="fusion",
        description="A graph-level fusion compiler for PyTorch programs.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"fusion {fusion.__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_explain(commands)
    _add_kernels(commands)
    _add_comparisons(commands)
    _add_time(commands)
    _add_machine(commands)
    return whole


def _add_demo(commands: add.Commands) -> None:
    what = "compile GPT-2, compare it with eager, show what was fused"
    demo = add.command(commands, "demo", what, "demo\ndemo --quick --device cpu", module="commands")
    demo.add_argument("--quick", action="store_true", help="a small GPT-2 and 64 tokens, for trying it out")
    add.add_device(demo)
    demo.add_argument(
        "--dump", type=add.folder, default=Path("fusion-dump"), metavar="DIR", help="default: ./fusion-dump"
    )


_EXPLAIN = """
explain model.py:forward --shape 8,128 --shape 128
explain package.model:Net --shape 4,16 --train --times
explain model.py:forward --shape 8,128 --option numerics=strict --json
explain model.py:Net --shape 4,16 --train --verify --html report.html
explain model.py:Net --shape 4,16 --target triton --arch sm_90
explain model.pt2
"""


def _add_explain(commands: add.Commands) -> None:
    what = "show the kernels of a program, and what was not fused and why"
    explain = add.command(commands, "explain", what, _EXPLAIN, module="commands")
    add.add_program(explain)
    add.add_settings(explain)
    explain.add_argument(
        "--dump", type=add.folder, metavar="DIR", help="write every stage of the compilation below DIR"
    )
    explain.add_argument("--times", action="store_true", help="also show the time of each pass of the compilation")
    explain.add_argument("--measure", action="store_true", help="also measure each kernel, beside its predicted time")
    explain.add_argument(
        "--verify",
        action="store_true",
        help="also check each kernel against float64, and each rewrite on inputs on which derivations break",
    )
    add.add_target(explain)
    add.add_page(explain)


_KERNELS = """
kernels model.py:forward --shape 8,128
kernels model.py:forward --shape 8,128 --target triton --arch sm_90
"""


def _add_kernels(commands: add.Commands) -> None:
    kernels = add.command(commands, "kernels", "print the sources generated for a program", _KERNELS, module="commands")
    add.add_program(kernels)
    add.add_settings(kernels)
    add.add_target(kernels)
    add.add_page(kernels)

    what = "print PTX, or another stage, of the kernels generated for a program; needs no GPU"
    ptx = add.command(commands, "ptx", what, _PTX, module="commands")
    add.add_program(ptx)
    ptx.set_defaults(train=False, mode=None, dynamic=False)
    add.add_options(ptx)
    add.add_target(ptx, "triton")
    ptx.add_argument(
        "--stage",
        metavar="STAGE",
        help="ttir, ttgir, llir, ptx or sass of Triton, s (assembly) of C; default: ptx, amdgcn or s",
    )
    add.add_page(ptx)


_PTX = """
ptx model.py:forward --shape 8,128 --arch sm_90
ptx model.py:forward --shape 8,128 --arch sm_90 --stage sass
ptx model.py:forward --shape 8,128 --target c --option numerics=strict
"""


_BISECT = """
bisect model.py:Net --shape 4,16
bisect model.py:forward --shape 8,128 --train --rtol 1e-3 --atol 1e-5
"""


def _add_comparisons(commands: add.Commands) -> None:
    what = "compare each kernel of a program with float64"
    accuracy = add.command(commands, "accuracy", what, "accuracy model.py:forward --shape 8,128", module="commands")
    add.add_program(accuracy)
    add.add_settings(accuracy)
    add.add_json(accuracy)

    what = "compare the results of a program, and its gradients, with eager and float64"
    examples = (
        "verify model.py:Net --shape 4,16 --train\nverify model.py:forward --shape 8,128 --rtol 1e-3 --against float64"
    )
    verify = add.command(commands, "verify", what, examples, module="comparing")
    what = "find the kernel, or the pass, that makes results differ from eager"
    bisect = add.command(commands, "bisect", what, _BISECT, module="comparing")
    for parser in (verify, bisect):
        add.add_program(parser)
        add.add_settings(parser)
        add.add_tolerances(parser)
        add.add_page(parser)


_TIME = """
time model.py:forward --shape 8,128
time model.py:Net --shape 64,1024 --train --compare inductor
"""


_BENCH = """
bench model.py:forward --shape 8,128
bench model.py:Net --shape 64,1024 --train --json
bench model.py:Net --shape 64,1024 --html report.html
"""


def _add_time(commands: add.Commands) -> None:
    what = "measure each kernel and library call of a program, against what memory and arithmetic allow"
    bench = add.command(commands, "bench", what, _BENCH, module="bench")
    add.add_program(bench)
    add.add_settings(bench)
    add.add_page(bench)

    what = "time a program in eager and compiled, side by side"
    time = add.command(commands, "time", what, _TIME, module="timing")
    add.add_program(time)
    add.add_settings(time)
    time.add_argument("--compare", choices=("inductor",), help="also time this backend of torch.compile")
    time.add_argument(
        "--rounds",
        type=add.rounds,
        metavar="N",
        help="timed calls of each, from 2 on; default: as many as fit into two seconds, 5 to 200",
    )
    add.add_page(time)


def _add_machine(commands: add.Commands) -> None:
    what = "examine this machine: what works, and what to install or change"
    add.add_json(add.command(commands, "doctor", what, "doctor\ndoctor --json", module="doctor"))

    what = "measure this machine, so that predicted times are its own"
    calibrate = add.command(commands, "calibrate", what, "calibrate --device cpu", module="commands")
    add.add_device(calibrate)
    add.add_json(calibrate)

    what = "show what the cache directory holds, and clear it"
    cache = add.command(commands, "cache", what, "cache\ncache --clear", module="commands")
    cache.add_argument("--clear", action="store_true", help="remove all that was kept there")
    add.add_json(cache)

    what = "print a script that completes commands and options in a shell"
    completion = add.command(commands, "completion", what, _COMPLETION, module="completion")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="for which shell")


_COMPLETION = """
completion bash >> ~/.bashrc
completion zsh >> ~/.zshrc
completion fish > ~/.config/fish/completions/fusion.fish
"""


__all__ = ["main", "parser"]
