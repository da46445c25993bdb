"""Generates counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011) in int64 tensor arithmetic.

Input: a seed and a counter per element; output: float32, the same numbers that `tl.rand` and `tl.randn` give for that
seed and offset.  Nothing is drawn from a generator: the same seed and offset always give the same number.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def words(seed: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four 32-bit output words, as int64 in [0, 2³²), for key `seed` and counter (offset, 0) (both int64).

    >>> [hex(int(word)) for word in words(torch.tensor(0), torch.tensor(0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    zero = torch.zeros_like(offset)
    return philox((offset & _LOW, (offset >> 32) & _LOW, zero, zero), (seed & _LOW, (seed >> 32) & _LOW))


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run ten rounds over four 32-bit counter words and two 32-bit key words, all held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low 32 bits of a 64-bit product; b is split in 16 bits, as int64 would overflow."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)  # each below 2⁴⁸
    return (upper + (lower >> 16)) >> 16, (a * b) & _LOW


def uniform(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return float32 in [0, 1) from the first output word."""
    return _unit(words(seed, offset)[0])


def normal(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return float32 of the standard normal distribution: Box-Muller on the first two output words."""
    first, second, _, _ = words(seed, offset)
    radius = torch.sqrt(-2.0 * torch.log(_unit(first).clamp_min(1.0e-7)))
    return radius * torch.cos(6.283185307179586 * _unit(second))


def _unit(word: torch.Tensor) -> torch.Tensor:
    """Map a 32-bit word to float32 in [0, 1): negative words (as int32) are folded onto the positive ones."""
    folded = torch.where(word >= 1 << 31, _LOW - word, word)
    return folded.to(torch.float32) * 4.6566127342e-10  # below 1 after rounding, also for the largest word
