"""A small model of equal blocks, and training steps whose losses and parameters are compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES = 16, 5


class Block(nn.Module):
    """A feed-forward block, which may be checkpointed."""

    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return result


class Model(nn.Module):
    """Equal blocks and a head."""

    def __init__(self, blocks: int = 3, width: int = WIDTH, checkpointed: bool = False) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Block(width, checkpointed) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def model(**settings: Any) -> Model:
    """The model, with the same parameters at each call, in float64."""
    torch.manual_seed(0)
    return Model(**settings).double()


@dataclass(frozen=True)
class Training:
    """How a model is trained: batches to a step, and whether under autocast.  Each process draws its own rows."""

    steps: int = 3
    accumulated: int = 1
    autocast: bool = False
    seed: int = 1
    rows: int = 6

    def run(self, trained: nn.Module, width: int = WIDTH) -> tuple[Tensor, list[Tensor]]:
        """The losses, and the parameters after the steps."""
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        draws = torch.Generator().manual_seed(self.seed)
        dtype = next(trained.parameters()).dtype
        losses = []
        for _ in range(self.steps):
            for batch in range(self.accumulated):
                x = torch.randn(self.rows, width, generator=draws, dtype=dtype)
                y = torch.randint(CLASSES, (self.rows,), generator=draws)
                unsynced: Callable[[], Any] = getattr(trained, "no_sync", nullcontext)
                with unsynced() if batch < self.accumulated - 1 else nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                        loss = nn.functional.cross_entropy(trained(x).to(dtype), y)
                    loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses), [whole(parameter.detach()) for parameter in trained.parameters()]


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_trained_alike(ours: nn.Module, eager: nn.Module, how: Training, width: int = WIDTH) -> None:
    """Losses and parameters agree, as exactly as their precision permits."""
    close = {"rtol": 3e-2, "atol": 3e-2} if how.autocast else {"rtol": 1e-8, "atol": 1e-9}
    torch.testing.assert_close(how.run(ours, width), how.run(eager, width), **close)
