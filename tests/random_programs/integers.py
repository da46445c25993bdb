"""Entries for integer arguments `n` and `m`: of any sign, and symbolic under dynamic shapes.

Holes are those of `templates`.
"""

from __future__ import annotations

ALONG = "torch.arange({x}.shape[-1], device={x}.device)"

INTEGERS = (
    "{x} * (n // 2)",
    "{n} - m // 3",
    "{x} + n % 3",
    "{f} * ((n - m) // (n * n + 1))",
    "{f} / (abs(m) + 1)",
    "{f} * (n / 7)",
    "{x} * (n > m)",
    "{n}.clamp(min(n, m), max(n, m))",
    "torch.where({n} > n, {n}, m)",
    "torch.full_like({f}, n) * {F}",
    "{i}.long() % (n * n + 1)",
    "{i}.long() // (abs(m) + 2)",
    "{i} << n % 3",
    "{x}.roll(n, {d})",
    "{x}.roll((n, -m), ({d}, {e}))",
    "{x}.roll(2 * n - m)",
    "{x}[n % {x}.shape[0]]",
    "{x}.select({d}, n % 2 - 1)",
    "{x}.narrow({d}, m % 2, 1)",
    "{x}[..., n % 3 :]",
    "{x}[..., : -1 - m % 2]",
    "{x}.tril(n)",
    "{x}.triu(-m)",
    "{x}.diagonal(n % 2)",
    "F.pad({x}, (n % 3, m % 2))",
    "F.pad({x}, (-(n % 2), 1))",
    "{x}.repeat_interleave(n % 3 + 1, {d})",
    "{x}.unsqueeze(0).expand(m % 3 + 1, *{x}.shape)",
    f"{{x}} + ({ALONG} * n + m)",
    f"{{x}} * (({ALONG} - n) % 3)",
    f"{{x}} * (({ALONG} * m + n) // 4)",
    f"{{x}}.masked_fill({ALONG} + n > m, 0)",
    f"{{x}}[..., ({ALONG} + n) % {{x}}.shape[-1]]",
    f"{{x}}.index_select(-1, ({ALONG} * m - n) % {{x}}.shape[-1])",
    "torch.arange(n, n + {x}.shape[-1], device={x}.device) * {x}",
    "torch.eye(n % 4 + 1, m % 5 + 1, device={x}.device) * {x}.flatten()[0]",
)
