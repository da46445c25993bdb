"""Integer arguments: one compilation serves any sign, with Python's arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fusion
from fusion.backend import Backend
from fusion.options import Options

Program = Callable[[torch.Tensor, int, int], torch.Tensor]

PROGRAMS: dict[str, Program] = {
    "a quotient": lambda x, n, m: x * (n // 2) + (m + n) // 3,
    "a rest": lambda x, n, m: x * (n % 3) + (m + n) % 4,
    "divided by one another": lambda x, n, m: x * (n // m) + n % m,
    "a position": lambda x, n, m: x[n % 4] * (m % 5),
    "rolled": lambda x, n, m: x.roll((n, m), (0, 1)),
    "rolled by a computed number": lambda x, n, m: x.roll(-n, 0) + x.roll(n * m, 1),
    "rolled flat": lambda x, n, m: x.roll(3 * n - m) * 2,
    "padded": lambda x, n, m: torch.nn.functional.pad(x, (n % 3, m % 2)) + 1,
    "positions": lambda x, n, m: x[(torch.arange(4, device=x.device) + n) % 4] * m,
    "a mask": lambda x, n, m: torch.where((torch.arange(5, device=x.device) - n) % 3 == 0, x, m),
    "bools by a condition": lambda x, n, m: x * ((x > 0) * (n > m) + (x < 1) * (n + m > 1)),
    "numbers by a condition": lambda x, n, m: x * (n > m) + (x > 0).byte() * (n > m),
}

CALLS = ((3, 4), (-2, 5), (5, -3), (-7, -4), (2, -2), (-3, 4))


def check(f: Program, target: str | None) -> None:
    """Results and gradients are eager's in every call, and the first call compiles for all."""
    backend = Backend(Options(strict=True, target=target))
    compiled = torch.compile(f, backend=backend, dynamic=True)
    for n, m in CALLS:
        x, y = (torch.linspace(-1, 2, 20).view(4, 5).requires_grad_() for _ in range(2))
        expected, got = f(x, n, m), compiled(y, n, m)
        assert torch.equal(got, expected), (n, m)
        for result in (expected, got):
            (result * torch.linspace(0, 1, result.numel()).view(result.shape)).sum().backward()
        assert torch.equal(y.grad, x.grad), (n, m)
    assert sum(report.label == "forward" for report in backend.reports) == 1


def check_large(target: str | None) -> None:
    """Pass numbers beyond 32 bits to a function compiled for smaller ones."""

    def program(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        return x + n, torch.where(x > n, x, n), x.clamp(max=n)

    compiled = torch.compile(program, backend=Backend(Options(strict=True, target=target)), dynamic=True)
    for n in (3, 2**31, -(2**40), 2**63 - 1):
        x = torch.arange(-3, 4)
        for got, expected in zip(compiled(x, n), program(x, n), strict=True):
            assert torch.equal(got, expected), n


def test_integers_beyond_32_bits() -> None:
    check_large("c")


@pytest.mark.parametrize("name", PROGRAMS)
def test_integers_of_any_sign(name: str) -> None:
    check(PROGRAMS[name], "c")


WIDE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "added": lambda x, n: x + n,
    "compared": lambda x, n: x > n,
    "filled": lambda x, n: x + torch.full((3,), n),
    "chosen": lambda x, n: torch.where(x > 1, n, x),
    "a bound": lambda x, n: x.clamp(max=n),
    "computed": lambda x, n: x * (n * 8 + 1),
    "computed and narrow again": lambda x, n: x + n * 8 // 2**66,
    "a wide constant": lambda x, n: x + (n - 2**70),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("name", WIDE)
def test_integers_that_64_bits_cannot_hold_are_taken_as_eager_takes_them(name: str, dtype: torch.dtype) -> None:
    f = WIDE[name]
    fused, x = fusion.fuse(f), torch.arange(3).to(dtype)

    def outcome(function: Callable[..., torch.Tensor], n: int) -> object:
        try:
            return function(x, n).tolist()
        except (OverflowError, RuntimeError):  # of Dynamo, where it meets the number first
            return "refused"

    for n in (
        3,
        4,
        2**40,
        2**60,
        2**62,
        2**63 - 1,
        2**63,
        2**64 - 1,
        2**64,
        2**70,
        -(2**63),
        -(2**63) - 1,
        -(2**70),
        6,
    ):
        assert outcome(fused, n) == outcome(f, n), n
    assert fusion.report(fused).kernels or "constant" in name or "again" in name  # of which 64 bits hold no part
