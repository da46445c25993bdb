"""Small programs whose results hardly depend on rounding, with inputs; each draw has constants of its own.

The constants are part of the kernels' texts, so a program that was drawn anew has no entry in any cache.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BODIES = (
    "(x * {a} + y).relu()",
    "torch.softmax(x * {a}, -1) + {b}",
    "(x - x.mean(-1, keepdim=True)) * {a}",
    "(x * {a}).sum(0) + y[0]",
    "x[i] * {a} + {b}",
    "x.index_add(0, i, y * {a})",
    "x.add_(y * {a})",
    "torch.cat([x * {a}, y.flip(0)], 1).t()",
    "torch.where(x > {b}, x * {a}, y)",
    "(x * {a}).cumsum(1) - y",
)
"""Results of tensors x and y, and of indices i of rows of x, with constants a and b."""


@dataclass(frozen=True)
class Program:
    """The text of a function of x, y and i, and the shape of x and y.

    Attributes:
        name: of the function.
        file: that its code claims to come from.
    """

    body: str
    shape: tuple[int, int]
    name: str = "program"
    file: str = "<a drawn program>"

    @classmethod
    def drawn(cls, rng: random.Random, body: str = "") -> Program:
        """Return a program with constants that no other draw has, in all likelihood."""
        a, b = (round(rng.uniform(0.25, 2), 9) for _ in range(2))
        body = (body or rng.choice(BODIES)).format(a=a, b=b)
        return cls(body, (rng.randint(2, 9), rng.randint(1, 17)))

    def function(self) -> Callable[..., Tensor]:
        """Return the program as a function."""
        text = f"def {self.name}(x, y, i):\n    return {self.body}\n"
        linecache.cache[self.file] = (len(text), None, text.splitlines(keepends=True), self.file)
        space: dict[str, object] = {"torch": torch, "F": F}
        exec(compile(text, self.file, "exec"), space)
        return space[self.name]  # type: ignore[return-value]  # the text defines it

    def arguments(self, seed: int = 0) -> list[Tensor]:
        """Return fresh arguments."""
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(self.shape, generator=generator) for _ in range(2))
        return [x, y, torch.randint(0, self.shape[0], self.shape[:1], generator=generator)]


def agree(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether results and changed arguments are those of eager but for rounding."""
    return all(
        one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-5, atol=1e-5)
        for one, other in zip(ours, theirs, strict=True)
    )
