"""Special functions against eager: in float64 to its last digits, in fewer no worse than twice eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import mpmath
import pytest
import torch

from fusion.lowering.interpret import run_program
from tests.lowering.lowered import calls, check, lowered

S = torch.special
INF, NAN = math.inf, math.nan

WIDE = torch.cat([torch.linspace(-30, 30, 241), torch.tensor([0.0, -0.0, 1e-6, -1e-6, 7.999, 8.001, NAN, INF, -INF])])
POSITIVE = torch.cat([torch.linspace(0.01, 40, 300), torch.tensor([0.0, 1e-5, 1.999, 2.001, -1.0, NAN])])
UNIT = torch.cat([torch.linspace(-1, 1, 201), torch.tensor([1e-7, -1e-7, 0.999999, -0.999999, 1.5, NAN])])

POLYNOMIAL = torch.cat(
    [torch.linspace(-1.6, 1.6, 65), torch.tensor([1.0, -1.0, 0.999])]
)  # of NaN eager gives any number

FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "i0": (torch.i0, WIDE),
    "i0e": (S.i0e, WIDE),
    "i1": (S.i1, WIDE),
    "i1e": (S.i1e, WIDE),
    "k0": (S.modified_bessel_k0, POSITIVE),
    "k1": (S.modified_bessel_k1, POSITIVE),
    "scaled_k0": (S.scaled_modified_bessel_k0, POSITIVE),
    "scaled_k1": (S.scaled_modified_bessel_k1, POSITIVE),
    "spherical_j0": (S.spherical_bessel_j0, WIDE),
    "erfcx": (S.erfcx, WIDE[(WIDE > -9) | WIDE.isnan()]),
    "erfinv": (torch.erfinv, UNIT),
    "ndtri": (S.ndtri, UNIT.abs()),
    "log_ndtr": (S.log_ndtr, WIDE),
    "digamma": (torch.digamma, WIDE[(WIDE != -INF) & (WIDE != -0.5)]),  # that is next to a root
    "trigamma": (lambda x: torch.polygamma(1, x), POSITIVE[POSITIVE > 0]),
    "tetragamma": (lambda x: torch.polygamma(2, x), WIDE[WIDE.abs() < 20]),
    "pentagamma": (lambda x: torch.polygamma(3, x), WIDE[WIDE.abs() < 20]),
    "zeta": (lambda x: S.zeta(x, 2.5), POSITIVE[POSITIVE < 12]),
    "zeta_below": (lambda x: S.zeta(torch.full_like(x, 3.0), x), WIDE[WIDE.abs() < 20]),
    **{
        f"{kind}_{order}": (partial(lambda f, n, x: f(x, n), getattr(S, kind), order), POLYNOMIAL)
        for kind in ("chebyshev_polynomial_t", "chebyshev_polynomial_u", "shifted_chebyshev_polynomial_t")
        for order in (-1, 0, 1, 4, 11, 20)
    },
    **{
        f"{kind}_{order}": (partial(lambda f, n, x: f(x, n), getattr(S, kind), order), POLYNOMIAL)
        for kind in ("chebyshev_polynomial_v", "chebyshev_polynomial_w", "shifted_chebyshev_polynomial_w")
        for order in (0, 1, 4, 11)
    },
    "trigamma_below": (lambda x: torch.polygamma(1, x), torch.arange(-15, 0) + 0.25),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_double(name):
    function, x = FUNCTIONS[name]
    check(
        function, x.double(), tolerance=2e-9 if "gamma" in name else 2e-11 if "poly" in name else 2e-13
    )  # eager's own has nine digits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_fewer_digits(name, dtype):
    function, x = FUNCTIONS[name]
    x = x.to(dtype)
    try:
        function(x)
    except NotImplementedError:
        pytest.skip("eager has no such kernel")
    program = lowered(function, x)
    assert not calls(program)
    (result,), eager, exact = run_program(program, [x]), function(x), function(x.double())
    assert torch.equal(result.isnan(), eager.isnan())
    rounded = exact.to(dtype).double()
    known = rounded.isfinite() & eager.isfinite()
    assert torch.equal(result[~known & ~eager.isnan()], eager[~known & ~eager.isnan()])
    slack = 8 * torch.finfo(dtype).eps * rounded.abs().clamp(min=1e-6)
    off, own = (result.double() - rounded).abs(), (eager.double() - rounded).abs()
    assert bool((off <= 2 * own + slack)[known].all())


def test_the_inverse_of_erf_is_nearly_rounded_once():
    """Up to the last number below 1; eager's is within 0.55 units of the last place, too."""
    y = torch.cat(
        [torch.linspace(0, 0.999, 200_000), 1 - torch.arange(1, 200_000) * 2.0**-24, torch.rand(1000) * 1e-30]
    )
    ((result,), exact) = run_program(lowered(torch.erfinv, y), [y]), torch.erfinv(y.double())
    unit = torch.nextafter(exact.float(), torch.tensor(torch.inf)) - exact.float()
    assert ((result.double() - exact).abs() / unit).max() < 0.55


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_inverse_of_erf_keeps_the_sign_of_zero(dtype: torch.dtype):
    y = torch.tensor([-0.0, 0.0], dtype=dtype)
    (result,) = run_program(lowered(torch.erfinv, y), [y])
    assert result.signbit().tolist() == [True, False]


def test_integers_become_floats():
    check(torch.digamma, torch.arange(1, 9), tolerance=1e-6)
    check(torch.erfinv, torch.tensor([-1, 0, 1]))


def test_high_derivatives_are_left():
    program = lowered(lambda x: torch.polygamma(21, x), POSITIVE)
    assert list(calls(program)) == ["polygamma.default"]


def test_orders_may_be_data():
    x, n = torch.linspace(-1.2, 1.2, 25, dtype=torch.float64)[:, None], torch.arange(-2, 14)
    for kind in "tuvw":
        function = getattr(S, f"chebyshev_polynomial_{kind}")
        check(lambda x, n, function=function: function(x, n.to(x.dtype) + 0.25), x, n, tolerance=1e-11)


OSCILLATING = {
    "j0": (S.bessel_j0, lambda x: mpmath.besselj(0, x), WIDE),
    "j1": (S.bessel_j1, lambda x: mpmath.besselj(1, x), WIDE),
    "y0": (S.bessel_y0, lambda x: mpmath.bessely(0, x), POSITIVE),
    "y1": (S.bessel_y1, lambda x: mpmath.bessely(1, x), POSITIVE),
    "airy": (S.airy_ai, mpmath.airyai, WIDE),
}
"""Function, the truth (eager's own kernels have five digits in places), and where."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OSCILLATING)
def test_bessel_and_airy_functions(name, dtype):
    function, truth, x = OSCILLATING[name]
    x = x.to(dtype)
    x = x[x.isfinite() & ((x > 0) if name[0] == "y" else True)]
    (result,) = run_program(lowered(function, x), [x])
    exact = torch.tensor([float(truth(mpmath.mpf(value))) for value in x.tolist()], dtype=torch.float64)
    slack = 2e-13 if dtype is torch.float64 else torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=slack, atol=slack)


def test_bessel_and_airy_functions_at_the_ends():
    x = torch.tensor([INF, -INF, NAN, 0.0, -1.0], dtype=torch.float64)
    ends = {
        S.bessel_j0: [0.0, 0.0, NAN, 1.0],
        S.bessel_j1: [0.0, 0.0, NAN, 0.0],
        S.bessel_y0: [0.0, NAN, NAN, -INF, NAN],
        S.bessel_y1: [0.0, NAN, NAN, -INF, NAN],
        S.airy_ai: [0.0, NAN, NAN, 0.3550280538878172],
    }
    for function, expected in ends.items():
        (actual,) = run_program(lowered(function, x), [x])
        want = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(actual[: len(want)], want, equal_nan=True)
