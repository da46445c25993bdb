"""Runs a suite of cases: measures them in order, and prints each at once, or why it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.harness import REFUSALS, Result, cold_seconds, measure
from benchmarks.programs import Case
from benchmarks.tables import header, row, summary


def run_suite(suite: str, cases: Sequence[Case], device: str, *, rounds: int, cold: bool, only: str) -> int:
    """Measure and print all cases; return 1 if any was refused.

    Consecutive cases under the same systems share a header.
    """
    chosen = [case for case in cases if only in case.name]
    if not chosen:
        print(f"no case of {suite} has {only!r} in its name: {', '.join(case.name for case in cases)}")
        return 2
    results: list[Result] = []
    columns: tuple[str, ...] = ()
    for case in chosen:
        systems = (*case.systems, *(name for name, _ in case.rivals))
        if systems != columns:
            print(header(systems, cold=cold), flush=True)
            columns = systems
        try:
            result = measure(case, device, rounds=rounds)
            if cold:
                result.cold = {system: cold_seconds(suite, case.name, system) for system in ("inductor", "fusion")}
        except REFUSALS as reason:
            print(f"{case.name}: refused: {reason}", flush=True)
            continue
        results.append(result)
        print(row(result), flush=True)
    if results:
        print("\n".join(summary(results, len(chosen))))
    return int(len(results) < len(chosen))


def print_rows(cases: Iterable[tuple[str, Callable[[], Iterable[str]]]]) -> int:
    """Print the rows of each named case; return 1 if any was refused."""
    refused = 0
    for name, rows in cases:
        try:
            for row in rows():
                print(row, flush=True)
        except REFUSALS as reason:
            print(f"{name}: refused: {reason}", flush=True)
            refused += 1
    return int(refused > 0)
