"""Training steps of whole models on a GPU, by the clock: forward, loss and backward, and the memory at their peak.

The models are those of `transformers` and `torchvision`, with random weights.  Every system trains the same parameters
in turn; gradients are compared with eager's and float64's before anything is timed.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion
from benchmarks.clocks import peak_bytes
from benchmarks.harness import Refused, check_generated

SYSTEMS = ("eager", "inductor", "fusion")
ALLOWED = 2.0
"""Errors of all gradients together, in eager's."""


@dataclass(frozen=True)
class Model:
    """A model in bfloat16 with one batch; `loss` calls it."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0))


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50(weights=None)


def _tokens(rows: int, length: int, words: int, *, masked: bool = False) -> Callable[[], dict[str, Tensor]]:
    def batch() -> dict[str, Tensor]:
        ids = torch.randint(words, (rows, length), device="cuda")
        given = {"input_ids": ids, "labels": ids}
        if masked:
            lengths = torch.randint(length // 2, length + 1, (rows, 1), device="cuda")
            given["attention_mask"] = (torch.arange(length, device="cuda") < lengths).long()
        return given

    return batch


def _images() -> dict[str, Tensor]:
    return {
        "images": torch.randn(64, 3, 224, 224, device="cuda"),
        "labels": torch.randint(1000, (64,), device="cuda"),
    }


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _classified(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(batch["images"].to(dtype)).float(), batch["labels"])


MODELS = (
    Model("GPT-2 8x1024", _gpt2, _tokens(8, 1024, 50257), _own_loss),
    Model("BERT 16x512", _bert, _tokens(16, 512, 30522, masked=True), _own_loss),
    Model("ResNet-50 64x224x224", _resnet50, _images, _classified),
)


def run(*, only: str, quick: bool) -> int:
    """All models whose name contains `only`; 1 if one was refused."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16, milliseconds a step, by the clock")
    print(f"{'model':<24}{'mode':<18}" + "".join(f"{system:>10}{'MiB':>8}" for system in SYSTEMS) + f"{'error':>8}")
    refused = 0
    for model in MODELS:
        if only in model.name:
            for mode in (None, "reduce-overhead"):
                refused += not _measured(model, mode, rounds=10 if quick else 30)
    return int(refused > 0)


def _measured(model: Model, mode: str | None, rounds: int) -> bool:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = model.make().cuda().bfloat16().train()
    batch = model.batch()
    backend = fusion.Backend(fusion.Options.read(mode=mode))
    losses = {
        "eager": model.loss,
        "inductor": torch.compile(model.loss, backend="inductor", mode=mode),
        "fusion": torch.compile(model.loss, backend=backend),
    }
    steps = {system: _step(module, batch, loss) for system, loss in losses.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        gradients = {system: _gradients(module, step) for system, step in steps.items()}
    text = f"{model.name:<24}{mode or 'default':<18}"
    try:
        check_generated(backend)
    except Refused as reason:
        print(f"{text}refused: {reason}", flush=True)
        return False
    wide = copy.deepcopy(module).double()
    exact = _gradients(wide, _step(wide, batch, model.loss))
    del wide
    errors = {system: _distance(given, exact) for system, given in gradients.items()}
    gradients.clear()
    if not errors["fusion"] <= ALLOWED * errors["eager"]:
        print(f"{text}refused: errors {errors}", flush=True)
        return False
    samples: dict[str, list[float]] = {system: [] for system in steps}
    peaks = {}
    for system, step in steps.items():
        for _ in range(4):
            step()
        module.zero_grad()
        peaks[system] = peak_bytes(step)
    for _ in range(rounds):
        for system, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            samples[system].append((time.perf_counter() - start) / 3)
    for system, values in samples.items():
        text += f"{statistics.median(values) * 1e3:>10.2f}{peaks[system] / 2**20:>8.0f}"
    print(f"{text}{errors['fusion'] / errors['eager']:>7.2f}x", flush=True)
    return True


def _step(module: nn.Module, batch: dict[str, Tensor], loss: Callable[..., Tensor]) -> Callable[[], None]:
    def step() -> None:
        module.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        loss(module, batch).backward()

    return step


def _gradients(module: nn.Module, step: Callable[[], None]) -> list[Tensor]:
    step()
    found = [p.grad.double() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def _distance(given: list[Tensor], exact: list[Tensor]) -> float:
    """The length of the error of all gradients, in units of their own."""
    squares = sum((a - b).square().sum().item() for a, b in zip(given, exact, strict=True))
    return float(squares / sum(b.square().sum().item() for b in exact)) ** 0.5
