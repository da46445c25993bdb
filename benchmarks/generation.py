"""Benchmarks one step of a language model on a CPU: tokens per second, and the fraction of the speed of memory.

Models are Llama's of transformers, with random weights and a static cache, for one token of one sequence.  A step reads
the weights of all linear layers once; beside it, a reduction reads as many bytes of plain integers with all threads.
Results are compared with eager's and float64's before anything is timed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import fusion
from benchmarks.clocks import seconds_in_turn
from benchmarks.harness import Refused, check_generated, distance
from benchmarks.suite import print_rows

THREADS = 2
SYSTEMS = ("eager", "inductor", "fusion")
PROMPT, LONGEST, WORDS = 64, 256, 8192
ALLOWED = 2.0
"""The largest error of the logits, relative to eager's."""


@dataclass(frozen=True)
class Case:
    """A model by its sizes; `bits` and `group` of its weights (16: bfloat16)."""

    name: str
    sizes: Mapping[str, int]
    bits: int = 16
    group: int | None = None

    @property
    def weights(self) -> str:
        kind = "bf16" if self.bits == 16 else f"int{self.bits}"
        return f"{kind}{'' if self.group is None else f' by {self.group}'}"


SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6}
FORMATS = ((16, None), (8, None), (8, 32), (4, 32), (4, 128))
CASES = tuple(
    Case(name, sizes, bits, group)
    for name, sizes in (("Llama 12 x 1024", SMALL), ("Llama 6 x 2048", LARGE))
    for bits, group in FORMATS
)


def run(*, only: str, quick: bool) -> int:
    """Run all cases whose name and format contain `only`; return 1 if one was refused."""
    torch.set_num_threads(THREADS)
    print(
        f"{THREADS} threads, torch {torch.__version__}; tokens/s, and the fraction of the speed of reading the weights"
    )
    print(
        f"{'model':<18}{'weights':<14}{'MiB':>6}{'GB/s':>7}"
        + "".join(f"{name:>17}" for name in SYSTEMS)
        + f"{'error':>8}"
    )
    chosen = (case for case in CASES if only in f"{case.name} {case.weights}")
    return print_rows((f"{c.name}, {c.weights}", partial(measured, c, 5 if quick else 25)) for c in chosen)


def llama(sizes: Mapping[str, int]) -> nn.Module:
    """Return a Llama of these sizes, with heads of 64 of which 4 share keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = sizes["hidden_size"] // 64
    config = LlamaConfig(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=WORDS,
        max_position_embeddings=LONGEST,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.bfloat16().eval()


def stepping(model: nn.Module, program: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """Return a call that computes the logits after a token that follows a prompt, always at the same position."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=LONGEST)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (1, PROMPT + 1), generator=generator)
    with torch.no_grad():
        model(words[:, :PROMPT], past_key_values=cache)

    def step() -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(PROMPT)
        with torch.no_grad():
            return program(model, words[:, PROMPT:], cache)

    return step


def logits(model: nn.Module, words: Tensor, cache: object) -> Tensor:
    """Return the logits of the words, which follow those in the cache."""
    result: Tensor = model(words, past_key_values=cache).logits
    return result


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
    backend = fusion.Backend(fusion.Options.read())
    programs: dict[str, Callable[..., Tensor]] = {
        "eager": logits,
        "inductor": torch.compile(logits, backend="inductor", dynamic=False),
        "fusion": torch.compile(logits, backend=backend, dynamic=False),
    }
    calls = {name: stepping(model, program) for name, program in programs.items()}
    wide = copy.deepcopy(model).double()
    exact = stepping(wide, logits)()
    del wide
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        errors = {name: distance(call(), exact) for name, call in calls.items()}
    check_generated(backend)
    if not errors["fusion"] <= ALLOWED * errors["eager"]:
        raise Refused(f"errors {errors}")
    memory = torch.zeros(THREADS, count // 4 // THREADS, dtype=torch.int32)
    samples = seconds_in_turn({**calls, "read": lambda: memory.amax(1)}, "cpu", rounds)
    times = {name: min(values) for name, values in samples.items()}
    text = f"{case.name:<18}{case.weights:<14}{count / 2**20:>6.0f}{count / times['read'] / 1e9:>7.1f}"
    for name in SYSTEMS:
        text += f"{1 / times[name]:>10.1f} ({times['read'] / times[name]:.2f})"
    yield f"{text}{errors['fusion'] / errors['eager']:>7.2f}x"
