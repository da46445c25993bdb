"""Implements the commands that compare a program with eager: `fusion verify` and `fusion bisect`."""

from __future__ import annotations

import argparse
from typing import TypedDict

import torch

import fusion
from fusion.calls.waiting import waiting
from fusion.cli.output import plain, print_json, write_page
from fusion.cli.programs import prepared
from fusion.diagnosis.bisection import Bisection
from fusion.diagnosis.bisection import bisect as bisected
from fusion.diagnosis.verification import verify as verified
from fusion.inspect.agreement import Agreement


def verify(arguments: argparse.Namespace) -> int:
    """Print how far each result is from eager and float64; exit with 1 if one is too far, or none was compiled."""
    with torch.set_grad_enabled(arguments.train):
        case = prepared(arguments)
        with waiting("verifying"):
            compare = verified(case.program, **_tolerances(arguments), **case.settings)
            agreement = compare(*case.inputs, **case.kwargs)
    if arguments.json:
        print_json(
            {
                "agrees": agreement.agrees,
                "compiled": agreement.compiled,
                "values": agreement.values,
                "note": agreement.note,
            }
        )
    else:
        print(agreement)
    _show_page(arguments, agreement, agreement)
    return 0 if agreement.agrees and agreement.compiled else 1


def _show_page(arguments: argparse.Namespace, outcome: Agreement | Bisection, compared: Agreement) -> None:
    """Write the page of the graphs that were compared, if asked, and say where it is."""
    good = outcome.agrees and compared.compiled
    line = write_page(arguments, fusion.Explanation(compared.reports), good=good, text=str(outcome))
    if line and not arguments.json:
        print(f"\n{line}")


def bisect(arguments: argparse.Namespace) -> int:
    """Print the kernel or pass that makes results differ from eager; exit with 1 if there is one, or no graph."""
    with torch.set_grad_enabled(arguments.train):
        case = prepared(arguments)
        with waiting("bisecting"):
            search = bisected(case.program, **_tolerances(arguments), **case.settings)
            bisection = search(*case.inputs, **case.kwargs)
    if arguments.json:
        fields = plain(bisection)
        assert isinstance(fields, dict)
        print_json({"agrees": bisection.agrees, "compiled": bisection.agreement.compiled, **fields})
    else:
        print(bisection)
    _show_page(arguments, bisection, bisection.agreement)
    return 0 if bisection.agrees and bisection.agreement.compiled else 1


class _Tolerances(TypedDict):
    rtol: float | None
    atol: float | None
    against: str


def _tolerances(arguments: argparse.Namespace) -> _Tolerances:
    return {"rtol": arguments.rtol, "atol": arguments.atol, "against": arguments.against}
