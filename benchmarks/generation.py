"""Benchmarks a language model on a CPU: tokens per second, and the fractions of the speed of memory.

Models are Llama's of transformers, with random weights and a static cache.  A step is one token of one sequence, and
reads the weights of all linear layers once.  Two limits stand beside it (`memory_speed`): the time in which all
threads *read* as many bytes, which is the stricter one, and the time in which they *copy* them, that is, read and write
as many.  A prompt is 128 tokens at once.

TorchInductor runs in its default mode, under `max-autotune` with weights that it may pack (`freezing`), and with
PyTorch's own products of int8 and int4 weights (`packed`).  Fusion runs as a backend of `torch.compile`, which checks
its guards at each call, and as a saved program (`saved`), which has none.  Results are compared with eager's and
float32's before anything is timed; calls take turns, and medians count.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import fusion
from benchmarks.harness import Refused, check_generated, distance
from benchmarks.memory_speed import beside_memory
from benchmarks.packed import packed
from benchmarks.saved_step import saved_call
from benchmarks.suite import print_rows

THREADS = 2
BEFORE, LONGEST, WORDS = 64, 256, 8192
PROMPT = 128
ALLOWED = 2.0
"""The largest error of the logits, relative to eager's."""

TUNED = {"max_autotune": True, "freezing": True}
"""TorchInductor's options: without `freezing` none of its own products is a candidate on a CPU."""


BRIEF = ("eager", "inductor", "packed", "fusion", "saved")
EVERY = ("eager", "inductor", "max-autotune", "packed", "packed, tuned", "fusion", "saved")
"""Systems of a case; those with packed weights only where PyTorch multiplies by weights of that format."""


@dataclass(frozen=True)
class Case:
    """A model by its sizes; `bits` and `group` of its weights (16: bfloat16); `tokens` of a call."""

    name: str
    sizes: Mapping[str, int]
    bits: int = 16
    group: int | None = None
    tokens: int = 1
    systems: tuple[str, ...] = BRIEF

    @property
    def weights(self) -> str:
        kind = "bf16" if self.bits == 16 else f"int{self.bits}"
        return f"{kind}{'' if self.group is None else f' by {self.group}'}"


GPT2 = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 50304}
"""The sizes of GPT-2, with the vocabulary rounded up to a multiple of 64."""
SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6}
BILLION = {**LARGE, "num_hidden_layers": 22, "vocab_size": 32000}
FORMATS = ((16, None), (8, None), (8, 32), (4, 32), (4, 128))
CASES = (
    *(
        Case(name, sizes, bits, group, systems=systems)
        for name, sizes, systems in (
            ("Llama 12 x 768", GPT2, BRIEF),
            ("Llama 12 x 1024", SMALL, BRIEF),
            ("Llama 6 x 2048", LARGE, EVERY),
        )
        for bits, group in FORMATS
    ),
    *(
        Case(name, sizes, bits, group, tokens, EVERY)
        for name, sizes, tokens in (
            ("Llama 12 x 768 prompt", GPT2, PROMPT),
            ("Llama 12 x 1024 prompt", SMALL, PROMPT),
            ("Llama 6 x 2048 prompt", LARGE, PROMPT),
            ("Llama 1b", BILLION, 1),
            ("Llama 1b prompt", BILLION, PROMPT),
        )
        for bits, group in FORMATS
    ),
)


def run(*, only: str, quick: bool, systems: Sequence[str] = ()) -> int:
    """Run all cases whose name and format contain `only`; return 1 if one was refused.

    Without `only`, models of a billion parameters are left out: TorchInductor compiles each for minutes.
    """
    torch.set_num_threads(THREADS)
    print(f"{THREADS} threads, torch {torch.__version__}; tokens/s (fractions of reading and of copying the weights)")
    chosen = [case for case in CASES if (only or "Llama") in f"{case.name}, {case.weights}"]
    chosen = [case for case in chosen if only or case.sizes is not BILLION]
    if systems:
        chosen = [replace(c, systems=tuple(name for name in c.systems if name in ("eager", *systems))) for c in chosen]
    return print_rows((f"{c.name}, {c.weights}", partial(measured, c, 5 if quick else 25)) for c in chosen)


def llama(sizes: Mapping[str, int]) -> nn.Module:
    """Return a Llama of these sizes, with heads of 64 of which 4 share keys."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = sizes["hidden_size"] // 64
    config = LlamaConfig(
        **{"vocab_size": WORDS, **sizes},
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=LONGEST,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


@dataclass(frozen=True)
class Position:
    """Tokens that follow others: `before` in the cache, and the `words` after these."""

    cache: Any
    words: Tensor
    before: int

    @classmethod
    def of(cls, model: nn.Module, tokens: int) -> Position:
        """Return the position of some tokens: one follows a prompt; several are a prompt themselves."""
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=LONGEST)
        before = BEFORE if tokens == 1 else 0
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(WORDS, (1, before + tokens), generator=generator)
        with torch.no_grad():
            model(words[:, : max(before, 1)], past_key_values=cache)  # this also allocates the cache
        return cls(cache, words[:, before:].clone(), before)


def calling(model: nn.Module, program: Callable[..., Tensor], tokens: int) -> Callable[[], Tensor]:
    """Return a call that computes the logits after the last of some tokens, always at the same position."""
    at = Position.of(model, tokens)

    def call() -> Tensor:
        for layer in at.cache.layers:
            layer.cumulative_length.fill_(at.before)
        with torch.no_grad():
            return program(model, at.words, at.cache)

    return call


def logits(model: nn.Module, words: Tensor, cache: object) -> Tensor:
    """Return the logits after the last of the words, which follow those in the cache."""
    result: Tensor = model(words, past_key_values=cache, logits_to_keep=1).logits
    return result


def programs(case: Case, model: nn.Module, backend: fusion.Backend) -> dict[str, Callable[[], Tensor]]:
    """Return the call of each system of a case."""
    narrow = packed(model) if any(name.startswith("packed") for name in case.systems) else None
    tuned: dict[str, Any] = {"backend": "inductor", "options": TUNED}
    settings: dict[str, dict[str, Any]] = {
        "inductor": {"backend": "inductor"},
        "max-autotune": tuned,
        "packed": {"backend": "inductor"},
        "packed, tuned": tuned,
        "fusion": {"backend": backend},
    }
    calls = {}
    for name in case.systems:
        of = narrow if name.startswith("packed") else model
        if name == "saved":
            at = Position.of(model, case.tokens)
            calls[name] = saved_call(model, at.cache, at.words, at.before)
        elif of is not None:
            program = torch.compile(_own(name), dynamic=False, **settings[name]) if name in settings else logits
            calls[name] = calling(of, program, case.tokens)
    return calls


def _own(name: str) -> Callable[..., Tensor]:
    """Return a function that computes logits, with code of its own: compilations of one function share a limit."""

    def own(model: nn.Module, words: Tensor, cache: object) -> Tensor:
        return logits(model, words, cache)

    own.__code__ = own.__code__.replace(co_name=f"logits_{name}")
    return own


def measured(case: Case, rounds: int) -> Iterator[str]:
    """Yield the row of one case.

    Raises:
        Refused: a wrong result, or no generated kernel.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = llama(case.sizes)
    if case.bits < 16:
        fusion.quantize_weights(model, bits=case.bits, group=case.group)
    linears = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, fusion.QuantizedLinear))]
    count = sum(tensor.nbytes for layer in linears for tensor in (*layer.parameters(), *layer.buffers()))
    wide = copy.deepcopy(model).float()
    exact = calling(wide, logits, case.tokens)().double()
    del wide
    backend = fusion.Backend(fusion.Options.read())
    calls = programs(case, model, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        errors = {name: distance(call(), exact) for name, call in calls.items()}
    if "fusion" in calls:
        check_generated(backend)
    if wrong := [name for name, error in errors.items() if not error <= ALLOWED * errors["eager"]]:
        raise Refused(f"errors of {', '.join(wrong)}: {errors}")
    yield from _rows(case, calls, count, rounds, errors)


def _rows(
    case: Case, calls: Mapping[str, Callable[[], Tensor]], count: int, rounds: int, errors: Mapping[str, float]
) -> Iterator[str]:
    times = beside_memory(calls, count, THREADS, rounds)
    read, copied = (
        count / median(second for each in times.values() for second in getattr(each, what)) / 1e9
        for what in ("read", "copy")
    )
    title = f"{case.name}, {case.weights}: {count / 2**20:.0f} MiB"
    yield f"{title}, read at {read:.1f} GB/s, copied at {copied:.1f} GB/s"
    for name, own in times.items():
        fractions = f" ({own.of_reading:.2f} {own.of_copying:.2f})" if case.tokens == 1 else ""
        yield f"    {name:<14}{case.tokens / own.seconds:>8.1f}{fractions}, error {errors[name] / errors['eager']:.2f}x"
