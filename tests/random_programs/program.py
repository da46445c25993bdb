"""A random program: readable source over named inputs, tensors and integers, with the calls it is judged by.

Printed, it is an expression that a regression test can hold.
"""

from __future__ import annotations

import itertools
import linecache
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random_programs.inputs import Input

Function = Callable[..., tuple[Tensor, ...]]
SHORT = r"torch\.(?:float32|float16|bfloat16|float|half)\b"
"""The names of dtypes that `wide` replaces."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Program:
    """A function of tensors, and of integers after them, that returns a tuple of tensors, and how it is called.

    Attributes:
        source: the body of the function, over the names of the inputs.
        calls: the sizes of each call, and its integers.
        dynamic: as for `fuse`.
        backward: with the gradients of every input that may have one.
        seed: of the inputs' numbers.
        integers: names of the integers that are passed.
        options: of `fuse`, for the calls in turn; the program is compiled once for each.
    """

    inputs: tuple[Input, ...]
    source: str
    calls: tuple[Mapping[str, int], ...]
    dynamic: bool | None = None
    backward: bool = False
    seed: int = 0
    integers: tuple[str, ...] = ()
    options: tuple[Mapping[str, object], ...] = ({},)

    def __str__(self) -> str:
        inputs = "".join(f"        {entry},\n" for entry in self.inputs)
        body = textwrap.indent(textwrap.dedent(self.source).strip(), " " * 8)
        names = ("dynamic", "backward", "seed", "integers")
        settings = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        settings += [f"options={self.options}"] if any(self.options) else []
        rest = "".join(f"    {setting},\n" for setting in settings)
        return (
            f'Program(\n    inputs=(\n{inputs}    ),\n    source="""\n{body}\n    """,\n'
            f"    calls=({', '.join(str(dict(call)) for call in self.calls)},),\n{rest})"
        )

    @property
    def lines(self) -> list[str]:
        """The statements, the last of them the return."""
        return textwrap.dedent(self.source).strip().splitlines()

    def function(self, *, wide: bool = False, copies: bool = False, rounded: bool = False) -> Function:
        """The program as a function; with `wide`, every float of its own is a float64.

        With `copies`, a cast that `wide` leaves without effect gives a copy nonetheless, as it does in the program.
        With `rounded`, a cast to a float that is named gives a float64, too, but rounded to the named one.
        """
        body = "\n".join(self.lines)
        if wide:
            body = re.sub(r"\.(float|half|bfloat16)\(\)", r".to(torch.\1)", body)
            if rounded:
                body = re.sub(rf"\.to\({SHORT}\)", r"\g<0>.to(torch.float64)", body)
            kept = r"(?!\)\.to\(torch\.float64\))" if rounded else ""
            body = re.sub(SHORT + kept, "torch.float64", body)
        if copies:
            body = re.sub(r"\.to\((torch\.float64|\w+\.dtype)\)", r".to(\1, copy=True)", body)
        return compiled(body, [*(entry.name for entry in self.inputs), *self.integers])

    def tensors(
        self, call: int, device: str = "cpu", *, wide: bool = False, shift: float = 0.0, apart: bool = False
    ) -> list[Tensor]:
        """Return fresh tensors for one of the calls, as `Input.tensor` creates them."""
        seeds = [self.seed * 1009 + call * 101 + position for position in range(len(self.inputs))]
        return [
            entry.tensor(self.calls[call], seed, device, wide=wide, shift=shift, apart=apart)
            for entry, seed in zip(self.inputs, seeds, strict=True)
        ]

    def arguments(self, call: int, device: str = "cpu", **changes: Any) -> list[Tensor | int]:
        """Fresh arguments for one of the calls: `tensors`, then its integers."""
        return [*self.tensors(call, device, **changes), *(self.calls[call][name] for name in self.integers)]


def compiled(body: str, names: Sequence[str]) -> Function:
    """A function with this body; tracebacks and reports find its lines."""
    text = f"def program({', '.join(names)}):\n{textwrap.indent(body, '    ')}\n"
    file = f"<random program {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, object] = {"torch": torch, "F": F}
    exec(compile(text, file, "exec"), space)
    return space["program"]  # type: ignore[return-value]  # the text defines it
