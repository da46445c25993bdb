"""Demonstrates the compiler: compiles GPT-2, checks it against float64, times and explains it (`fusion demo`).

Input: a device and a folder for the dumps; output: a table on standard output and an exit code, which is 0 only if
kernels were generated and their error against a float64 run is no more than twice eager's.  The model is
transformers' GPT-2 with random weights, so nothing is downloaded.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.backend import Backend
from fusion.cli.timing import empty_caches
from fusion.inspect.explanation import Explanation
from fusion.inspect.progress import steps
from fusion.inspect.report import KernelReport
from fusion.lowering.errors import FusionError
from fusion.lowering.printer import format_bytes
from fusion.options import Options

# Written for this demonstration.
TEXT = """
The lamp in the harbour house was lit before the rain came. Old Maren had trimmed its wick with the care of a woman who
trusts small things, and she set the glass back over the flame and waited for it to clear. Down on the water the boats
were coming home one behind the other, slow and low, each with a single light at the mast, and she counted them as she
had counted them every evening for forty years: the ferry first, because it kept its hours; then the two brothers, who
never sailed out of sight of each other; then the boy who had bought his uncle's boat and had yet to learn to land it.

There were seven lights tonight, where there should have been eight. She counted again, from the left this time, and it
was still seven. The wind had gone round to the north, and it pulled at the shutters like a child that wants to come in.
She put on her coat, took the second lamp from its nail, and went down the steps to the stones, where nobody goes in the
dark, and held the light as high as her arm would reach.

It is a curious fact that a light held by one hand is seen farther than a light that stands on a shelf. It moves, and
what moves is noticed. Half a mile out, behind the black line of the breakwater, an eighth lamp answered her, rose, and
sank, and rose again. Nobody spoke of it later. The boy landed his boat badly, as he always did, and his uncle laughed.
"""

REPEATS = 5
"""Timed runs of each side, alternating."""


@dataclass(frozen=True, slots=True)
class DemoResults:
    """The results of one demonstration.  Times in seconds; errors are the largest absolute ones against float64."""

    what: str
    operations: int
    explanation: Explanation
    compile_time: float
    eager_times: tuple[float, ...]
    fused_times: tuple[float, ...]
    eager_error: float
    fused_error: float
    largest: float  # magnitude of the reference, the scale of the errors


def run(*, quick: bool = False, device: str | None = None, dump: Path = Path("fusion-dump")) -> int:
    """Run the demonstration and return the exit code.

    Args:
        quick: two layers, 256 words and 64 tokens, in place of GPT-2 small (12 layers, 50,257 words, 124 M parameters)
            and 512 tokens.
        device: "cpu" or "cuda"; None: CUDA if present.
        dump: the folder for every stage of the compilation.

    Raises:
        FusionError: transformers is not installed, or there is no such device.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise FusionError("this PyTorch sees no CUDA device", hint="run `fusion demo --device cpu`")
    measured = _measure(quick, where, dump)
    print("\n".join(_table(measured)))
    print(f"\nEvery stage of the compilation is in {dump}{os.sep}. Read first:")
    for line in _reading(dump):
        print(f"  {line}")
    return _verdict(measured)


def tokens(text: str, count: int) -> torch.Tensor:
    """Return the first `count` bytes of `text` in UTF-8 as token numbers, shape [1, count], int64.

    >>> tokens("né", 3)
    tensor([[110, 195, 169]])
    """
    data = text.encode()
    data *= -(-count // len(data))
    return torch.tensor([list(data[:count])])


def _gpt2(quick: bool) -> torch.nn.Module:
    """Build GPT-2 with transformers, with PyTorch's attention, in eval mode."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise FusionError(
            "the demonstration needs transformers, which is not installed", hint="pip install 'fusion-compiler[demo]'"
        ) from error
    config = GPT2Config(use_cache=False, attn_implementation="eager")
    if quick:
        config.n_layer, config.vocab_size = 2, 256
    model: torch.nn.Module = GPT2LMHeadModel(config)
    return model.eval()


@torch.no_grad()
def _measure(quick: bool, device: torch.device, dump: Path) -> DemoResults:
    with steps(6) as step:
        step("build GPT-2")
        torch.manual_seed(0)
        model = _gpt2(quick).to(device)
        ids = tokens(TEXT, 64 if quick else 512).to(device)
        eager = partial(_logits, model, ids)

        step("run it eagerly")
        with _Operations() as operations:
            expected = eager()

        step("compile it with Fusion")
        backend = Backend(Options.read(None, {"dump": None}))
        fused = partial(_logits, torch.compile(model, backend=backend), ids)
        actual, compile_time = _first_call(fused, device)

        step("run it in float64, for reference")
        reference = _logits(copy.deepcopy(model).double(), ids)

        step("time eager and fused in turn")
        eager_times, fused_times = _time_in_turn((eager, fused), device)

        step("write the dumps")
        torch.compile(model, backend=Backend(Options.read(None, {"dump": dump})))(ids)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return DemoResults(
        what=f"GPT-2, {parameters / 1e6:.0f} M parameters, {ids.numel()} tokens, float32, {device}",
        operations=operations.count,
        explanation=Explanation(tuple(backend.reports)),
        compile_time=compile_time,
        eager_times=eager_times,
        fused_times=fused_times,
        eager_error=_largest_difference(expected, reference),
        fused_error=_largest_difference(actual, reference),
        largest=float(reference.abs().max()),
    )


class _Prediction(Protocol):
    """The result of a language model."""

    logits: torch.Tensor


def _logits(model: Callable[..., _Prediction], ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of each next token, shape [1, tokens, words]."""
    return model(ids).logits


def _first_call(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    """Call a function that compiles, with an empty cache directory; return the result and the seconds."""
    with empty_caches():
        start = time.perf_counter()
        result = call()
        _wait(device)
        return result, time.perf_counter() - start


def _largest_difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    return float((result.double() - reference).abs().max())


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    """Counts the ATen calls that compute something; views are free."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        self.count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_in_turn(
    calls: tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]], device: torch.device
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of `REPEATS` runs of each call, alternating, so that noise affects both."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(REPEATS + 1):
        for call, series in zip(calls, times, strict=True):
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            if repeat:  # the first round warms up
                series.append(time.perf_counter() - start)
    return tuple(times[0]), tuple(times[1])


# Output -----------------------------------------------------------------------------------------------------


def _table(measured: DemoResults) -> list[str]:
    explanation = measured.explanation
    eager, fused = statistics.median(measured.eager_times), statistics.median(measured.fused_times)
    before, after = explanation.traffic_before, explanation.traffic_after
    rows = [
        ("", "eager", "Fusion"),
        (
            "launches",
            f"{measured.operations} ATen calls",
            f"{len(explanation.kernels)} kernels + {len(explanation.externs)} calls",
        ),
        ("bytes read", format_bytes(before.read), format_bytes(after.read)),
        ("bytes written", format_bytes(before.written), format_bytes(after.written)),
        ("time, median", f"{eager * 1e3:.1f} ms", f"{fused * 1e3:.1f} ms ({eager / fused:.2f}x)"),
        ("largest error", f"{measured.eager_error:.2e}", f"{measured.fused_error:.2e}"),
        ("compile time", "-", f"{measured.compile_time:.1f} s"),
    ]
    distinct = len({kernel.source for kernel in explanation.kernels})
    lines = ["", measured.what, ""]
    lines += [f"  {name:<15}{left:<20}{right}".rstrip() for name, left, right in rows]
    lines += ["", f"The largest of {distinct} distinct kernels, by bytes moved:", ""]
    lines += [f"  {'launches':<10}{'reads':<12}{'writes':<12}{'operations':<12}name"]
    for kernel, launches in _largest(explanation.kernels)[:3]:
        sizes = (
            f"{format_bytes(kernel.bytes_read):<12}{format_bytes(kernel.bytes_written):<12}{len(kernel.origins):<12}"
        )
        lines.append(f"  {launches:<10}{sizes}{kernel.name}")
    return lines


def _largest(kernels: Sequence[KernelReport]) -> list[tuple[KernelReport, int]]:
    """Return the distinct kernels and their numbers of launches, by bytes moved, the most first."""
    launches = Counter(kernel.source for kernel in kernels)
    distinct = {kernel.source: kernel for kernel in kernels}

    def moved(kernel: KernelReport) -> int:
        return (kernel.bytes_read + kernel.bytes_written) * launches[kernel.source]

    return [(kernel, launches[kernel.source]) for kernel in sorted(distinct.values(), key=moved, reverse=True)]


def _reading(dump: Path) -> Iterator[str]:
    """Yield the dumped files to read first, in reading order."""
    folder = max(dump.glob("*_*"), default=None, key=lambda path: path.stat().st_mtime)
    if folder is None:
        return
    for name, description in (
        ("99_report.txt", "kernels, calls that were left as they are, and what was not fused and why"),
        ("90_module.py", "the compiled graph: what is allocated, launched and called, line by line"),
        ("01_program.txt", "the lowered program, before any fusion"),
    ):
        if (folder / name).exists():
            yield f"{folder / name}  {description}"
    yield f"{folder / '40_*'}  the first kernel: as a block program, as source, and what the source became"


def _verdict(measured: DemoResults) -> int:
    explanation = measured.explanation
    failures = [report.failure for report in explanation.graphs if report.failure]
    if failures:
        print(f"\nFAILED: a region ran eagerly: {failures[0]}")
        return 1
    if not explanation.kernels:
        print("\nFAILED: no kernel was generated")
        return 1
    limit = 2 * measured.eager_error + 1e-6
    verdict, sign = ("ok", "≤") if measured.fused_error <= limit else ("FAILED", ">")  # a NaN error fails
    print(
        f"\n{verdict}: error against float64 {measured.fused_error:.2e} {sign} {limit:.2e} = 2 × eager's + 1e-6 "
        f"(logits up to {measured.largest:.1f})"
    )
    return 0 if verdict == "ok" else 1
