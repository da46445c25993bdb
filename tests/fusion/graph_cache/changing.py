"""Programs that compute something else in each process, by a factor that is passed to the process.

Each prints its name and whether its results and gradients with a filled cache equal those of a compilation without one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion.backend import Backend
from fusion.options import Options

FACTOR = float(sys.argv[1]) if __name__ == "__main__" else 1.0


@torch.library.custom_op("fusion_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda context, gradient: gradient * FACTOR)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * FACTOR

    @staticmethod
    def backward(ctx, gradient):
        return gradient * FACTOR


class Grown(torch.autograd.Function):
    """The same forward in each process."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * FACTOR


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = FACTOR
        self.register_buffer("held", torch.tensor([FACTOR]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.held


@contextlib.contextmanager
def replaced(owner: object, name: str) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, functools.wraps(own)(lambda *given, **named: own(*given, **named) * FACTOR))
    try:
        yield
    finally:
        setattr(owner, name, own)


@contextlib.contextmanager
def registered(operation: str, key: str, function: Callable[..., object]) -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(operation, function, key)
        yield


def cast_otherwise(x: Tensor, y: Tensor) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return torch.mm(x, y) * FACTOR


def in_16_bits(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(x, x.t()) + 1


def hooked(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: gradient * FACTOR)
    return y * 2


PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], contextlib.AbstractContextManager[object]]]] = {
    "operation": (lambda x: scaled(x.sin()) + 1, contextlib.nullcontext),
    "function": (lambda x: Scaled.apply(x.sin()) + 1, contextlib.nullcontext),
    "gradient": (lambda x: Grown.apply(x * 2) + 1, contextlib.nullcontext),
    "module": (Holder(), contextlib.nullcontext),
    "hook": (hooked, contextlib.nullcontext),
    "PyTorch's function": (lambda x: functional.relu(x) + 1, lambda: replaced(functional, "relu")),
    "PyTorch's operation": (lambda x: torch.cos(x) + 1, lambda: replaced(torch, "cos")),
    "PyTorch's method": (lambda x: x.exp() + 1, lambda: replaced(torch.Tensor, "exp")),
    "cast": (in_16_bits, lambda: registered("mm", "AutocastCPU", cast_otherwise)),
    "parts": (
        lambda x: torch.ops.aten.hardswish(x) + 1,
        lambda: registered("hardswish", "CompositeImplicitAutograd", lambda x: x.tanh() * FACTOR),
    ),
}


def compiled(function: Callable[[Tensor], Tensor], *, kept: bool) -> list[Tensor]:
    """Return result and gradient of a compilation that is stored in the cache, and may come from it."""
    torch._dynamo.reset()
    x = torch.linspace(-2, 3, 24).reshape(4, 6).requires_grad_()
    backend = Backend(Options.read(None, {"graph_cache": kept}))
    result = torch.compile(function, backend=backend)(x)
    result.sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad]


def main() -> None:
    warnings.simplefilter("ignore")
    for name, (function, within) in PROGRAMS.items():
        with within():
            pair = compiled(function, kept=True), compiled(function, kept=False)
        print(f"{name}: {'right' if all(map(torch.equal, *pair)) else 'of another process'}")


if __name__ == "__main__":
    main()
