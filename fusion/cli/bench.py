"""Measures each kernel and library call of a program (`fusion bench`).

Input: a program with its inputs; output: for each distinct kernel and call the time of one run in its place, the bytes
and additions per second, and the share of the device's peak bandwidth and arithmetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import fusion
from fusion.calls.waiting import waiting
from fusion.cli.output import print_json, write_page
from fusion.cli.programs import Prepared, prepared
from fusion.inspect.graphs import DeviceReport
from fusion.inspect.report import ExternReport, KernelReport


@dataclass(frozen=True, slots=True)
class MeasuredLaunch:
    """A kernel or a call, with all of its launches in a run of the program.

    Attributes:
        microseconds: of all launches; None if one of them could not be measured.
        allowed: the microseconds that memory and arithmetic allow, as predicted times assume them; None if unknown.
        predicted: None for calls.
    """

    name: str
    launches: int
    microseconds: float | None
    predicted: float | None
    bytes: int
    flops: int
    allowed: float | None


def bench(arguments: argparse.Namespace) -> int:
    """Print the time of each kernel and call; exit with 1 if no kernel was generated."""
    with torch.set_grad_enabled(arguments.train):
        case: Prepared = prepared(arguments)
        with waiting("measuring"):
            explained = fusion.explain(case.program, measure=True, backward=arguments.train, **case.settings)
            explanation = explained(*case.inputs, **case.kwargs)
    device = next((graph.device for graph in explanation.graphs if graph.device is not None), None)
    rows = sorted(_rows([*explanation.kernels, *explanation.externs], device), key=_order)
    text, good = "\n".join(_table(rows, device)), bool(explanation.kernels)
    page = write_page(arguments, explanation, good=good, text=text)
    if arguments.json:
        print_json({"program": arguments.program, "device": device, "measured": rows})
    else:
        print("\n\n".join(filter(None, [text, page])))
    return 0 if good else 1


def _order(row: MeasuredLaunch) -> float:
    return -(row.microseconds or 0.0)


def _rows(steps: Sequence[KernelReport | ExternReport], device: DeviceReport | None) -> Iterator[MeasuredLaunch]:
    """Yield equal steps as one: launches of one source, calls of one operation for one reason."""
    groups: dict[tuple[str, str], list[KernelReport | ExternReport]] = {}
    for step in steps:
        groups.setdefault((step.name, step.source if isinstance(step, KernelReport) else step.reason), []).append(step)
    for (name, _), each in groups.items():
        kernels = [step for step in each if isinstance(step, KernelReport)]
        moved = sum(_bytes(step) for step in each)
        flops = sum(step.flops for step in kernels)
        times = [step.measured for step in each if step.measured is not None]
        predicted = [step.predicted for step in kernels if step.predicted is not None]
        yield MeasuredLaunch(
            name,
            len(each),
            sum(times) if len(times) == len(each) else None,
            sum(predicted) if kernels and len(predicted) == len(each) else None,
            moved,
            flops,
            None if device is None or not kernels else sum(device.allows(_bytes(step), step.flops) for step in kernels),
        )


def _bytes(step: KernelReport | ExternReport) -> int:
    return step.bytes_read + step.bytes_written if isinstance(step, KernelReport) else step.traffic.total


def _table(rows: Sequence[MeasuredLaunch], device: DeviceReport | None) -> Iterator[str]:
    known = [row for row in rows if row.microseconds is not None]
    total = sum(row.microseconds or 0.0 for row in known)
    where = "" if device is None else f" on {device.name}"
    yield f"{sum(row.launches for row in rows)} launches and calls{where}, {total:.1f} µs measured one by one"
    yield ""
    yield f"{'µs':>10}{'share':>7}{'predicted':>11}{'GB/s':>9}{'GFLOP/s':>9}{'of roof':>9}{'times':>7}  name"
    for row in rows:
        took = row.microseconds
        if took is None:
            yield f"{'-':>10}{'':>7}{'':>11}{'':>9}{'':>9}{'':>9}{row.launches:>7}  {row.name}"
            continue
        predicted = "-" if row.predicted is None else f"{row.predicted:.1f}"
        roof = "-" if row.allowed is None else f"{row.allowed / took:.0%}"
        rates = f"{row.bytes / took * 1e-3:>9.1f}{row.flops / took * 1e-3:>9.1f}"
        yield f"{took:>10.1f}{took / total:>7.0%}{predicted:>11}{rates}{roof:>9}{row.launches:>7}  {row.name}"


__all__ = ["bench"]
