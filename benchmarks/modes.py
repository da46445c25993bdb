"""Benchmarks whole models on a GPU against every mode of TorchInductor: 12 forward passes and 8 training steps.

Each case is a process of its own.  The processes of a group compile side by side and are timed one after another, each
alone on the device; within a process the systems take turns.  Results, or the gradients of a step, are compared with
eager's and float64's beforehand.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import fusion
from benchmarks import models
from benchmarks.clocks import wall_seconds_in_turn
from benchmarks.harness import REFUSALS, Refused, check_generated
from benchmarks.models import Batch, Model
from benchmarks.training import ALLOWED, gradient_distance, gradients, training_step
from benchmarks.zoo import ZOO

DEVICE = "cuda"
GRAPHED = "reduce-overhead"
AUTOTUNED = "max-autotune"
SYSTEMS: Mapping[str, tuple[str, str | None]] = {
    "eager": ("", None),
    "fusion": ("fusion", None),
    "inductor": ("inductor", None),
    "fusion, graphs": ("fusion", GRAPHED),
    "inductor, graphs": ("inductor", GRAPHED),
    "inductor, tuned": ("inductor", AUTOTUNED),
}
"""Columns in the order in which they are compiled: the compiler, "" for none, and its mode."""

AT_ONCE = {False: 6, True: 4}
"""Processes that compile at the same time: of forward passes, and of training steps, which take more memory."""

READY = "ready to be timed"
PATIENCE = 220
"""Seconds that a process may compile for; a system that is not ready by then is left out of its row."""


@dataclass(frozen=True)
class Case:
    """A model's forward pass under `no_grad`, or its training step, in bfloat16."""

    model: Model
    trained: bool

    @property
    def name(self) -> str:
        return f"{self.model.name.removeprefix('zoo: ')}, {'step' if self.trained else 'forward'}"


def _named(name: str) -> Model:
    return next(model for model in ZOO if name in model.name)


def _answers(*names: str) -> Callable[[nn.Module, Batch], Tensor]:
    """Return the call that passes the tensors of these names and returns the logits."""

    def call(model: nn.Module, batch: Batch) -> Tensor:
        result: Tensor = model(**{name: batch[name] for name in names}).logits
        return result

    return call


def _translated(model: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = model(input_ids=batch["input_ids"], decoder_input_ids=batch["input_ids"]).logits
    return result


def _denoised(model: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = model(*(batch[name].to(next(model.parameters()).dtype) for name in ("noise", "time")))
    return result


def _forward(name: str, call: Callable[[nn.Module, Batch], Tensor]) -> Case:
    model = _named(name)
    return Case(Model(model.name, model.make, model.batch, call), trained=False)


GPT2 = partial(Model, "GPT-2 8x1024", models.gpt2, models.tokens(8, 1024, 50257))
BERT = partial(Model, "BERT 16x512", models.bert, models.tokens(16, 512, 30522, masked=True))
RESNET = partial(Model, "ResNet-50 64x224x224", models.resnet50, models.images(64))
CONVNEXT = partial(Model, "ConvNeXt-T 64x224x224", models.convnext_tiny, models.images(64))

CASES = (
    Case(GPT2(models.logits), trained=False),
    Case(BERT(_answers("input_ids", "attention_mask")), trained=False),
    _forward("ViT-B/16", models.classes),
    _forward("T5", _translated),
    _forward("Llama", models.logits),
    _forward("Swin-T", models.classes),
    _forward("DeBERTa-v2", models.logits),
    _forward("U-Net", _denoised),
    _forward("Mixer-B/16", models.classes),
    Case(RESNET(models.classes), trained=False),
    Case(CONVNEXT(models.classes), trained=False),
    _forward("EfficientNet-B0", models.classes),
    Case(GPT2(models.own_loss), trained=True),
    Case(BERT(models.own_loss), trained=True),
    Case(_named("ViT-B/16"), trained=True),
    Case(_named("T5"), trained=True),
    Case(_named("Llama"), trained=True),
    Case(_named("Swin-T"), trained=True),
    Case(CONVNEXT(models.classified), trained=True),
    Case(RESNET(models.classified), trained=True),
)


def run(*, only: str, quick: bool) -> int:
    """Run all cases whose name contains `only`; return 1 if one was refused."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16, milliseconds a call, by the clock")
    print(f"{'model':<34}" + "".join(f"{system:>18}" for system in SYSTEMS) + f"{'error':>8}{'× best':>8}")
    chosen = [case for case in CASES if only in case.name]
    shares: dict[bool, list[float]] = {}
    for group in _groups(chosen):
        for case, answer in zip(group, _answers_of(group, rounds=5 if quick else 15), strict=True):
            if "refused" in answer:
                print(f"{case.name}: refused: {answer['refused']}", flush=True)
            else:
                shares.setdefault(case.trained, []).append(_share(answer["seconds"]))
                print(_row(case, answer), flush=True)
    for trained, values in shares.items():
        text = f"{math.exp(statistics.fmean(map(math.log, values))):.2f} times, the lowest {min(values):.2f}"
        print(f"{'training' if trained else 'inference'}, {len(values)} models: {text}")
    return int(sum(map(len, shares.values())) < len(chosen))


def _groups(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    for trained, count in AT_ONCE.items():
        alike = [case for case in cases if case.trained == trained]
        yield from (alike[first : first + count] for first in range(0, len(alike), count))


def _answers_of(group: Sequence[Case], *, rounds: int) -> Iterator[dict[str, Any]]:
    """Compile the cases side by side, and yield the measurements of each, made while the others wait."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.modes", str(CASES.index(case)), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for case in group
    ]
    first = [_last_word(process) for process in processes]
    for process, word in zip(processes, first, strict=True):
        if word == READY:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            word = _last_word(process)
        process.kill()
        process.wait()
        yield json.loads(word) if word.startswith("{") else {"refused": "the process ended without an answer"}


def _last_word(process: subprocess.Popen[str]) -> str:
    """Return the next line of the process that is an answer, or "" at its end; pass over what libraries print."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == READY or line.startswith("{"):
            return line.strip()
    return ""


def _share(seconds: Mapping[str, float]) -> float:
    """Return how many times as fast as the best rival Fusion is, each in its best mode."""
    own = min(value for system, value in seconds.items() if SYSTEMS[system][0] == "fusion")
    return min(value for system, value in seconds.items() if SYSTEMS[system][0] != "fusion") / own


def _row(case: Case, answer: Mapping[str, Any]) -> str:
    seconds, compiled = answer["seconds"], answer["compiled"]
    text = "".join(f"{seconds[system] * 1e3:>18.2f}" if system in seconds else f"{'late':>18}" for system in SYSTEMS)
    text += f"{answer['error']:>7.2f}x{_share(seconds):>8.2f}"
    cold = "".join(f"{compiled[system]:>18.1f}" if system in compiled else " " * 18 for system in SYSTEMS)
    return f"{case.name:<34}{text}\n{'  first call, s':<34}{cold}"


def answer(case: Case, device: str, rounds: int, wait: Callable[[], object]) -> dict[str, Any]:
    """Compile a case under all systems, check the results, wait, and return the medians of its times in seconds.

    Raises:
        Refused: a wrong result, or no generated kernel.
    """
    torch.manual_seed(0)
    module, batch = case.model.make().to(device).bfloat16(), case.model.batch(device)
    _settle(case, module, batch)
    module.train(case.trained)
    backends = {system: fusion.Backend(fusion.Options.read(mode=mode)) for system, (_, mode) in SYSTEMS.items()}
    calls = {"eager": _closed(case, module, batch, case.model.call)}
    results, compiled = {"eager": _result(module, calls["eager"])}, {}
    before = signal.signal(signal.SIGALRM, _late)
    signal.alarm(PATIENCE)
    for system in [*SYSTEMS][1:]:
        start = time.perf_counter()
        call = _closed(case, module, batch, _under(system, case, backends[system]))
        try:
            results[system] = _result(module, call)
        except Exception:  # whatever the compiler makes of the alarm
            if signal.alarm(0):
                raise
            break
        calls[system], compiled[system] = call, time.perf_counter() - start
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    for system in calls:
        if SYSTEMS[system][0] == "fusion":
            check_generated(backends[system])
    error = _error(case, module, batch, results)
    for call in calls.values():
        for _ in range(4):
            call()
    module.zero_grad()
    torch.cuda.empty_cache()
    wait()
    samples = wall_seconds_in_turn(calls, device, rounds)
    seconds = {system: statistics.median(values) for system, values in samples.items()}
    return {"seconds": seconds, "compiled": compiled, "error": error}


def _settle(case: Case, module: nn.Module, batch: Batch) -> None:
    """Let batch norms see the batch: with their first statistics random weights lead to numbers near 0 or infinity.

    Weights of zero, as of the last layer of an image model of timm, are drawn: all results would be zero.
    """
    for weight in module.parameters():
        if weight.ndim > 1 and not weight.any():
            nn.init.normal_(weight, std=0.02)
    momentum = {norm: norm.momentum for norm in module.modules() if isinstance(norm, nn.BatchNorm2d)}
    for norm in momentum:
        norm.momentum = None  # the average of what was seen
    if momentum:
        with torch.no_grad():
            case.model.call(module.train(), batch)
    for norm, usual in momentum.items():
        norm.momentum = usual  # None reads a number of the device in each step


def _late(number: int, frame: object) -> None:
    raise TimeoutError(f"not compiled within {PATIENCE} s")


def _under(system: str, case: Case, backend: fusion.Backend) -> Callable[..., Tensor]:
    """Return the case's call under a system, with a code object of its own: Dynamo keeps what it compiles by code."""
    compiler, mode = SYSTEMS[system]
    source = case.model.call
    function = source.func if isinstance(source, partial) else source
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    if compiler == "inductor":
        return torch.compile(own, backend="inductor", mode=mode)
    return torch.compile(own, backend=backend)


def _closed(case: Case, module: nn.Module, batch: Batch, program: Callable[..., Tensor]) -> Callable[[], Tensor | None]:
    if case.trained:
        return training_step(module, batch, program)

    def forward() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return program(module, batch)

    return forward


def _result(module: nn.Module, call: Callable[[], Tensor | None]) -> list[Tensor]:
    """Return the result of a call in float64, or the gradients of a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        result = call()
    return gradients(module) if result is None else [result.double()]


def _error(case: Case, module: nn.Module, batch: Batch, results: dict[str, list[Tensor]]) -> float:
    """Return the larger error of Fusion's two modes, relative to eager's.

    Raises:
        Refused: it is too large.
    """
    wide = copy.deepcopy(module).double()
    exact = _result(wide, _closed(case, wide, batch, case.model.call))
    errors = {system: gradient_distance(values, exact) for system, values in results.items()}
    largest = max(error for system, error in errors.items() if SYSTEMS[system][0] == "fusion")
    if not largest <= ALLOWED * errors["eager"]:
        raise Refused(f"errors {errors}")
    return largest / errors["eager"]


def main() -> None:
    """Measure the case of a number, and print a JSON object after `READY` and a line of input."""
    case, rounds = CASES[int(sys.argv[1])], int(sys.argv[2])

    def wait() -> None:
        print(READY, flush=True)
        sys.stdin.readline()

    try:
        found = answer(case, DEVICE, rounds, wait)
    except REFUSALS as reason:
        found = {"refused": str(reason)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
