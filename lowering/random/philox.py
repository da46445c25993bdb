"""Generates counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011) in int64 tensor arithmetic.

Input: a seed and a counter per element; output: float32.  An evaluation gives four words of 32 bits: a number for each
of four neighbours, or, where a number takes two words, of two.  Nothing is drawn from a generator: the same seed and
counter always give the same number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion.lowering.ir.scalar_ops import Distribution

NEIGHBOURS: Mapping[Distribution, int] = {"uniform": 4, "normal": 2}
"""Distribution → the numbers that one evaluation of the generator gives, at neighbouring counters."""

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
    """Return float32 in [0, 1): one of four words for each of four neighbours."""
    a, b, c, d = words(seed, offset >> 2)
    return _unit(_chosen(offset & 1, _chosen(offset & 2, a, c), _chosen(offset & 2, b, d)))


def normal(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return float32 of the normal distribution: Box-Muller on two of four words for each of two neighbours."""
    a, b, c, d = words(seed, offset >> 1)
    first, second = _chosen(offset & 1, a, c), _chosen(offset & 1, b, d)
    radius = torch.sqrt(-2.0 * torch.log(_unit(first).clamp_min(1.0e-7)))
    return radius * torch.cos(6.283185307179586 * _unit(second))


def _chosen(bit: torch.Tensor, even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Return words of `even` where a bit is 0, of `odd` elsewhere."""
    return torch.where(bit == 0, even, odd)


def _unit(word: torch.Tensor) -> torch.Tensor:
    """Map a 32-bit word to float32 in [0, 1): negative words (as int32) are folded onto the positive ones."""
    folded = torch.where(word >= 1 << 31, _LOW - word, word)
    return folded.to(torch.float32) * 4.6566127342e-10  # below 1 after rounding, also for the largest word
