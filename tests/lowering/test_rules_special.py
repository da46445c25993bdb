"""Special functions against eager: in float64 to its last digits, in fewer no worse than twice eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lowering.interpret import run_program
from tests.lowering.lowered import calls, check, lowered

S = torch.special
INF, NAN = math.inf, math.nan

WIDE = torch.cat([torch.linspace(-30, 30, 241), torch.tensor([0.0, -0.0, 1e-6, -1e-6, 7.999, 8.001, NAN, INF, -INF])])
POSITIVE = torch.cat([torch.linspace(0.01, 40, 300), torch.tensor([0.0, 1e-5, 1.999, 2.001, -1.0, NAN])])
UNIT = torch.cat([torch.linspace(-1, 1, 201), torch.tensor([1e-7, -1e-7, 0.999999, -0.999999, 1.5, NAN])])

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
    "trigamma_below": (lambda x: torch.polygamma(1, x), torch.arange(-15, 0) + 0.25),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_double(name):
    function, x = FUNCTIONS[name]
    check(function, x.double(), tolerance=2e-9 if "trigamma" in name else 2e-13)  # eager's own has nine digits


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
    (found,), eager, exact = run_program(program, [x]), function(x), function(x.double())
    assert torch.equal(found.isnan(), eager.isnan())
    rounded = exact.to(dtype).double()
    known = rounded.isfinite() & eager.isfinite()
    assert torch.equal(found[~known & ~eager.isnan()], eager[~known & ~eager.isnan()])
    slack = 8 * torch.finfo(dtype).eps * rounded.abs().clamp(min=1e-6)
    off, own = (found.double() - rounded).abs(), (eager.double() - rounded).abs()
    assert bool((off <= 2 * own + slack)[known].all())


def test_integers_become_floats():
    check(torch.digamma, torch.arange(1, 9), tolerance=1e-6)
    check(torch.erfinv, torch.tensor([-1, 0, 1]))


def test_higher_derivatives_are_left():
    program = lowered(lambda x: torch.polygamma(2, x), POSITIVE)
    assert list(calls(program)) == ["polygamma.default"]
