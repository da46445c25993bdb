"""Records the verdicts on many pairs as JSON lines, and shows them as a table: `python -m benchmarks opinfo [options]`.

With `--out FILE` every verdict is appended to FILE as a line of JSON, and pairs that FILE already has are not run
again. A pair that was started and has no verdict there crashed the process: it counts as an error.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.limit import TimeUp, limited
from benchmarks.opinfo.pairs import DTYPES, Pair, pairs
from benchmarks.opinfo.verdict import Verdict, judge

SHOWN = 100
"""Characters of a reason in the table."""


def main(arguments: Sequence[str]) -> int:
    """Run the requested pairs; return 1 if anything is wrong."""
    options = _parser().parse_args(arguments)
    if options.one_thread:
        torch.set_num_threads(1)
    chosen = pairs(options.dtypes.split(","), options.device, options.only, _shard(options.shard))
    record = Record(options.out)
    start = time.monotonic()
    for pair in chosen:
        if options.budget and time.monotonic() - start > options.budget:
            break
        if not options.summary and record.wants(pair):
            verdict = _judged(pair, options, record)
            if verdict.status not in ("pass", "skipped"):
                print(_line(verdict), flush=True)
    names = {(pair.name, pair.dtype) for pair in chosen}
    verdicts = [verdict for key, verdict in record.verdicts.items() if key in names]
    print("\n".join(report(verdicts, failures=options.summary, externs=options.externs)))
    return int(any(verdict.status in ("mismatch", "error") for verdict in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks opinfo", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="operations whose name contains NAME; `NAME$`: is")
    parser.add_argument("--dtypes", default="float32", help=f"of {','.join(DTYPES)}")
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="every N-th operation, from the K-th on")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--target", help="a target other than the device's own")
    parser.add_argument("--samples", type=int, default=3, help="of each pair, before the odd ones")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--limit", type=int, default=120, metavar="SECONDS", help="for each pair")
    parser.add_argument("--budget", type=int, default=0, metavar="SECONDS", help="begin no pair after that long")
    parser.add_argument("--out", type=Path, metavar="FILE", help="json lines, appended to")
    parser.add_argument("--summary", action="store_true", help="run nothing: print the table of the --out file")
    parser.add_argument("--externs", action="store_true", help="list the library calls, most frequent first")
    parser.add_argument("--one-thread", action="store_true", help="leave the other cores alone")
    return parser


def _shard(text: str) -> tuple[int, int]:
    part, parts = text.split("/")
    return int(part), int(parts)


def _judged(pair: Pair, options: argparse.Namespace, record: Record) -> Verdict:
    record.begin(pair)
    try:
        with limited(options.limit):
            verdict = judge(
                pair,
                options.device,
                count=options.samples,
                backward=not options.forward,
                target=options.target,
            )
    except TimeUp:
        verdict = Verdict(pair.name, pair.dtype, "error", f"took more than {options.limit} s")
    record.add(verdict)
    return verdict


class Record:
    """Verdicts by pair, and their file, if any."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ():
            entry = json.loads(line)
            verdict = Verdict(**entry)
            self.verdicts[verdict.op, verdict.dtype] = verdict

    def wants(self, pair: Pair) -> bool:
        """Return whether the pair has no verdict yet."""
        return (pair.name, pair.dtype) not in self.verdicts

    def begin(self, pair: Pair) -> None:
        """Record a crash, until there is another verdict."""
        self.add(Verdict(pair.name, pair.dtype, "error", "took the process down"))

    def add(self, verdict: Verdict) -> None:
        """Record a verdict."""
        self.verdicts[verdict.op, verdict.dtype] = verdict
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")


def report(verdicts: Sequence[Verdict], *, failures: bool = True, externs: bool = False) -> list[str]:
    """Return the table: a line per dtype, then failures and operations left to the library."""
    lines = [
        f"{'dtype':<10}{'counted':>8}{'pass':>7}{'mismatch':>10}{'error':>7}{'native':>8}{'share':>7}{'skipped':>9}"
    ]
    for dtype in dict.fromkeys(verdict.dtype for verdict in verdicts):
        lines.append(_row(dtype, [verdict for verdict in verdicts if verdict.dtype == dtype]))
    if failures:
        lines.extend(_line(verdict) for verdict in verdicts if verdict.status in ("mismatch", "error"))
    if externs:
        lines.extend(_left_to_the_library(verdicts))
    return lines


def _row(dtype: str, verdicts: Sequence[Verdict]) -> str:
    status = Counter(verdict.status for verdict in verdicts)
    counted = sum(status.values()) - status["skipped"]
    native = sum(verdict.native for verdict in verdicts)
    share = f"{native / counted:.0%}" if counted else "-"
    return (
        f"{dtype:<10}{counted:>8}{status['pass']:>7}{status['mismatch']:>10}{status['error']:>7}"
        f"{native:>8}{share:>7}{status['skipped']:>9}"
    )


def _line(verdict: Verdict) -> str:
    reason = re.sub(r"\s+", " ", verdict.reason)
    return f"{verdict.status:<9} {verdict.op} {verdict.dtype}: {reason[: 2 * SHOWN]}"


def _left_to_the_library(verdicts: Iterable[Verdict]) -> list[str]:
    users: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for verdict in verdicts:
        for name, reason in verdict.externs.items():
            users.setdefault(name, []).append(verdict.op)
            reasons[name] = reason
    ordered = sorted(users, key=lambda name: (-len(users[name]), name))
    return [
        f"{len(users[name]):>4} {name} ({reasons[name] or 'no rule'}): {', '.join(dict.fromkeys(users[name]))}"[
            : SHOWN * 2
        ]
        for name in ordered
    ]
