"""Implements the commands that show, measure and keep: `demo`, `explain`, `accuracy`, `kernels`, `calibrate`, `cache`.

Input: the parsed arguments; output: text on standard output and an exit code.  A command that cannot run raises
`CommandError`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import fusion
from fusion.aot import AHEAD, exported
from fusion.calibrate import calibrate as measured_speeds
from fusion.calibrate import lines
from fusion.calls.waiting import waiting
from fusion.cli.output import print_json, write_page
from fusion.cli.programs import CommandError, Prepared, prepared
from fusion.codegen.cache import FOLDERS, cache_dir, clear, kept
from fusion.codegen.targets import TARGETS
from fusion.dumps.trace import passes_text
from fusion.lowering.printer import format_bytes
from fusion.options import Options


def demo(arguments: argparse.Namespace) -> int:
    """Compile GPT-2, compare it with eager, show what was fused."""
    from fusion.cli.demo import run  # it needs transformers, unlike the other commands

    return run(quick=arguments.quick, device=arguments.device, dump=arguments.dump)


def explain(arguments: argparse.Namespace) -> int:
    """Print the kernels of a program, and the edges that were not fused; exit with 1 if a certificate does not hold."""
    _refuse_for_export(arguments)
    with torch.set_grad_enabled(arguments.train):
        case = prepared(arguments)
        if arguments.target is None:
            explanation = _explained(arguments, case, measure=arguments.measure, verify=arguments.verify)
        else:
            explanation = _exported(arguments, case).explanation
    page = write_page(arguments, explanation)
    if arguments.json:
        print_json(explanation.json())
    else:
        print(explanation)
        for graph in explanation.graphs if arguments.times else ():
            print(f"\ncompilation of {graph.label}:\n{passes_text(graph.passes)}")
        if arguments.dump is not None:
            print(f"\nEvery stage is in {arguments.dump}; read each folder from 00_ to 99_.")
        if page:
            print(f"\n{page}")
    return 1 if explanation.certificate is not None and not explanation.certificate.holds else 0


def _explained(
    arguments: argparse.Namespace, case: Prepared, *, measure: bool = False, verify: bool = False
) -> fusion.Explanation:
    explained = fusion.explain(case.program, measure=measure, backward=arguments.train, verify=verify, **case.settings)
    with waiting("compiling"):
        return explained(*case.inputs, **case.kwargs)


def _exported(arguments: argparse.Namespace, case: Prepared) -> fusion.Export:
    """Generate kernels ahead of time."""
    options = Options.read(None, case.settings["options"])
    with waiting("generating"):
        return exported(case.program, tuple(case.inputs), case.kwargs, arguments.target, arguments.arch, options)


def accuracy(arguments: argparse.Namespace) -> int:
    """Print the error of each kernel of a program against float64; exit with 1 if one is wrong."""
    with torch.set_grad_enabled(arguments.train):
        case = prepared(arguments)
        with waiting("measuring errors"):
            result = fusion.accuracy(case.program, **case.settings)(*case.inputs, **case.kwargs)
    if arguments.json:
        print_json(result)
    else:
        print(result)
    return 0 if all(launch.is_right for launch in result.launches) else 1


def kernels(arguments: argparse.Namespace) -> int:
    """Print the sources generated for a program."""
    _refuse_for_export(arguments)
    with torch.set_grad_enabled(arguments.train):
        case = prepared(arguments)
        if arguments.target is None:
            explanation = _explained(arguments, case)
            sources = {kernel.source: kernel.name for kernel in explanation.kernels}
        else:
            export = _exported(arguments, case)
            explanation = export.explanation
            sources = {kernel.source: kernel.name for kernel in export.kernels}
    return _listed([(name, source) for source, name in sources.items()], arguments, explanation)


def _listed(kernels: Sequence[tuple[str, str]], arguments: argparse.Namespace, explanation: fusion.Explanation) -> int:
    """Print texts of kernels, by name, and write the page if asked; exit with 1 if there is none."""
    page, as_json = write_page(arguments, explanation, good=bool(kernels)), arguments.json
    if as_json:
        print_json([{"name": name, "text": text} for name, text in kernels])
    elif not kernels:
        print("fusion: no kernel was generated; `fusion explain` says why", file=sys.stderr)
    for number, (name, text) in enumerate(() if as_json else kernels, 1):
        print(f"{'' if number == 1 else chr(10)}=== kernel {number} of {len(kernels)}: {name} ===\n{text.rstrip()}")
    if page and not as_json:
        print(f"\n{page}")
    return 0 if kernels else 1


def ptx(arguments: argparse.Namespace) -> int:
    """Print a stage of the kernels generated for a program."""
    TARGETS[arguments.target](arguments.arch)
    _refuse_for_export(arguments)
    with torch.no_grad():
        export = _exported(arguments, prepared(arguments))
    kernels = export.kernels
    stages = list(
        dict.fromkeys(name for kernel in kernels for name, text in kernel.artefacts.items() if isinstance(text, str))
    )
    wanted = arguments.stage or next((name for name in _STAGES if name in stages), "")
    if kernels and wanted not in stages:
        raise CommandError(f"there is no stage {wanted!r}", hint=f"known: {', '.join(stages) or '-'}")
    texts = [(kernel.name, kernel.artefacts.get(wanted, "")) for kernel in kernels]
    return _listed([(name, text) for name, text in texts if isinstance(text, str)], arguments, export.explanation)


_STAGES = ("ptx", "amdgcn", "s")
"""The stage that is printed if none is named: the last text before the binary."""


def _refuse_for_export(arguments: argparse.Namespace) -> None:
    """Refuse arguments that do not go together, and architectures that are unknown.

    Raises:
        FusionError: they are refused.
    """
    if arguments.target is None:
        if arguments.arch is not None:
            raise CommandError("--arch is for kernels that are generated ahead of time", hint="add --target triton")
        return
    TARGETS[arguments.target](arguments.arch)
    words = ("train", "mode", "dynamic", "measure", "verify", "dump", "times")
    given = {f"--{word}": bool(getattr(arguments, word, None)) for word in words}
    given |= {f"--option {text}": text.partition("=")[0] not in AHEAD for text in arguments.option}
    if refused := [name for name, value in given.items() if value]:
        message = f"{refused[0]} does not go with --target, which generates kernels for inference ahead of time"
        raise CommandError(message, hint=f"leave out one of --target and {refused[0]}")


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure the device and print its figures, which later compilations predict with."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            "there is no GPU that PyTorch can use", hint="`fusion calibrate --device cpu`; `fusion doctor`"
        )
    kept("tuned")  # refuses a directory that cannot be used, before any time is spent
    with waiting("measuring"):
        figures = list(lines(*measured_speeds(device)))
    if arguments.json:
        print_json({"device": device, "figures": figures})
    else:
        print("\n".join(figures))
    return 0


def cache(arguments: argparse.Namespace) -> int:
    """Print the contents of the cache directory, and clear it if asked."""
    folders: dict[str, dict[str, object]] = {}
    for folder, description in FOLDERS.items():
        sizes = [path.stat().st_size for path in kept(folder)]
        folders[folder] = {"kept": len(sizes), "bytes": sum(sizes), "description": description}
        if arguments.clear:
            clear(folder)
    if arguments.json:
        print_json({"directory": str(cache_dir()), "folders": folders, "cleared": arguments.clear})
        return 0
    print(cache_dir())
    for name, entry in folders.items():
        size = format_bytes(int(str(entry["bytes"])))
        print(f"  {name}/  {entry['kept']} kept, {size}: {entry['description']}")
    if arguments.clear:
        print("cleared")
    return 0
