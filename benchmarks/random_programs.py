"""Runs random programs through `fuse` against eager: `python -m benchmarks random [options]`.

The grammar and the judge are those of `tests/random_programs`.  Program K of seed S is the same on every machine.  With
`--jobs N`, N processes share the work; a program that crashes its process counts as an error.  One that takes longer
than `--limit` is late, wherever it hangs: its process is killed.  The machine's load may cause that, so it is counted
separately.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread, Timer
from types import TracebackType
from typing import IO

import torch

from benchmarks.limit import TimeUp, limited
from tests.random_programs.builder import LARGEST
from tests.random_programs.grammar import generate
from tests.random_programs.judge import Verdict, is_lost, judge
from tests.random_programs.program import Program
from tests.random_programs.shrinking import smallest

FAILED = ("mismatch", "error", "late")

GRACE = 10
"""Seconds beyond `--limit` after which a process that does not end a program by itself is killed."""

HERE = Path(__file__).parents[1]

RESTART = 200
"""Programs after which a process of `--jobs` is replaced by a fresh one: compiled code accumulates."""


@dataclass(frozen=True)
class Entry:
    """The verdict on one program."""

    number: int
    verdict: Verdict

    def line(self) -> str:
        return json.dumps({"number": self.number, **asdict(self.verdict)})

    @classmethod
    def read(cls, line: str) -> Entry:
        fields = json.loads(line)
        return cls(fields.pop("number"), Verdict(**fields))


def main(arguments: Sequence[str]) -> int:
    """Run the requested programs; return 1 if anything is wrong."""
    options = _parser().parse_args(arguments)
    part, parts = (int(text) for text in options.shard.split("/"))
    numbers = range(options.first + part, options.first + options.count, parts)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
        print(program_of(options, options.only))
    end = time.monotonic() + options.budget if options.budget else float("inf")
    if options.worker:
        for entry in worked(numbers, options, end):
            print(entry.line(), flush=True)
        return 0
    single = options.only is not None
    source = worked(numbers, options, end) if single else shared(list(numbers), options, end)
    entries = []
    for entry in source:
        entries.append(entry)
        if entry.verdict.status in FAILED:
            print(shown(entry, options), flush=True)
        if options.names or single:
            for line in forgiven(entry, options):
                print(line, flush=True)
    print("\n".join(report([entry.verdict for entry in entries])))
    return int(any(entry.verdict.status in FAILED for entry in entries))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks random", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", help="a target other than the device's own")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--budget", type=float, default=0, metavar="SECONDS", help="begin no program after that long")
    parser.add_argument("--limit", type=int, default=120, metavar="SECONDS", help="for each program")
    parser.add_argument("--largest", type=int, default=LARGEST, metavar="N", help="elements of a tensor, at most")
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="every N-th program, from the K-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--smallest", action="store_true", help="make each program that fails as small as it gets")
    parser.add_argument(
        "--names", action="store_true", help="name failures, excused and uncaptured programs, with reasons"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER", help="show this program, and judge it")
    parser.add_argument("--worker", action="store_true", help="print verdicts as lines of json")
    return parser


def program_of(options: argparse.Namespace, number: int) -> Program:
    """Return program `number` of the seed."""
    return generate(random.Random(f"{options.seed}/{number}"), number, options.largest)


def worked(numbers: Sequence[int], options: argparse.Namespace, end: float) -> Iterator[Entry]:
    """Yield the verdicts of this process; a worker reports each program before it starts."""
    torch.set_num_threads(1)
    for number in numbers:
        if time.monotonic() > end:
            return
        yield from _one(number, options)
        if options.worker and is_lost(options.device):
            return  # the next program gets a process of its own


def _one(number: int, options: argparse.Namespace) -> Iterator[Entry]:
    if options.worker:
        yield Entry(number, Verdict("error", "took the process down"))
    try:
        with limited(options.limit):
            verdict = judge(program_of(options, number), options.device, options.target)
    except TimeUp as late:
        verdict = _late(options, late.__traceback__)
    yield Entry(number, verdict)


def shared(numbers: Sequence[int], options: argparse.Namespace, end: float) -> Iterator[Entry]:
    """Yield the verdicts of several processes, as they come."""
    queue: SimpleQueue[Entry | None] = SimpleQueue()

    def work(part: Sequence[int]) -> None:
        try:
            _processes(part, options, end, queue)
        finally:
            queue.put(None)

    for k in range(options.jobs):
        Thread(target=work, args=(numbers[k :: options.jobs],), daemon=True).start()
    for _ in range(options.jobs):
        yield from iter(queue.get, None)


def _processes(
    numbers: Sequence[int], options: argparse.Namespace, end: float, queue: SimpleQueue[Entry | None]
) -> None:
    """Run one process after the other, each continuing where the last one ended."""
    rest = list(numbers)
    while rest and time.monotonic() < end:
        chunk = rest[:RESTART]
        last = -1
        for entry in _process(chunk, options, end):
            queue.put(entry)
            last = entry.number
        rest = [number for number in rest if number > last] if last >= 0 else []


def _process(numbers: Sequence[int], options: argparse.Namespace, end: float) -> Iterator[Entry]:
    """Yield the verdicts of one process; the last one is on the program that crashed it, if any."""
    command = [*(sys.executable, "-m", "benchmarks", "random", "--worker"), f"--seed={options.seed}"]
    command += [f"--first={numbers[0]}", f"--count={numbers[-1] - numbers[0] + 1}"]
    command += [f"--shard=0/{numbers[1] - numbers[0] if len(numbers) > 1 else 1}"]
    command += [f"--device={options.device}", f"--limit={options.limit}", f"--largest={options.largest}"]
    command += [f"--target={options.target}"] if options.target else []
    command += [f"--budget={max(1.0, end - time.monotonic())}"] if options.budget else []
    begun: Entry | None = None
    late = Event()
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):

        def end_it() -> None:
            late.set()
            process.kill()

        assert process.stdout is not None
        watch = Timer(0, end_it)
        for entry in map(Entry.read, process.stdout):
            watch.cancel()
            if begun is None:
                begun = entry
                watch = Timer(options.limit + GRACE, end_it)
                watch.start()
            else:
                begun = None
                yield entry
        watch.cancel()
        code = process.wait()
        if begun is not None:
            yield Entry(begun.number, _late(options) if late.is_set() else _down(begun.verdict, code, stderr))


def _late(options: argparse.Namespace, trace: TracebackType | None = None) -> Verdict:
    """Return the verdict on a program that took too long; with its location, if it was interrupted from inside."""
    frames = traceback.extract_tb(trace)[:-1]  # without the frame that raised
    innermost = {frame.filename.startswith(str(HERE)): frame for frame in frames}  # of this repository, and of others
    places = [f"{frame.filename.removeprefix(str(HERE) + '/')}:{frame.lineno}" for frame in innermost.values()]
    return Verdict("late", " in ".join([f"took more than {options.limit} s", *places]))


def _down(verdict: Verdict, code: int, stderr: IO[str]) -> Verdict:
    """Return the verdict on a program that crashed its process: the exit code, and the last line of output."""
    stderr.seek(0)
    words = stderr.read().strip().splitlines()[-1:]
    return replace(verdict, reason=": ".join([f"{verdict.reason} (exit code {code})", *words]))


def shown(entry: Entry, options: argparse.Namespace) -> str:
    """Return a failure, and the program as text for a test."""
    if options.names:
        return f"{entry.verdict.status} {options.seed}/{entry.number}: {entry.verdict.reason}"
    program, verdict = program_of(options, entry.number), entry.verdict
    if options.smallest and verdict.status != "late" and not verdict.reason.startswith("took"):

        def fails(candidate: Program) -> bool:
            other = judge(candidate, options.device, options.target)
            return other.status == verdict.status and alike(other.reason, verdict.reason)

        program = smallest(program, fails)
        verdict = judge(program, options.device, options.target)
    return f"{verdict.status} {options.seed}/{entry.number}: {verdict.reason}\n{program}\n"


def forgiven(entry: Entry, options: argparse.Namespace) -> list[str]:
    """Return the results of a program that do not count as the compiler's failures."""
    verdict, name = entry.verdict, f"{options.seed}/{entry.number}"
    skipped = [f"not captured {name}: {verdict.reason}"] if verdict.status == "skipped" else []
    return skipped + [f"excused {name}: {excused}" for excused in verdict.excused]


def alike(one: str, other: str) -> bool:
    """Return whether two failures look alike: errors by type and place, results by their kind."""
    places = [reason.rpartition(" at ")[2] if " at /" in reason else "" for reason in (one, other)]
    return places[0] == places[1] and one.split()[2:3] == other.split()[2:3]


def report(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the summary of all verdicts."""
    status = Counter(verdict.status for verdict in verdicts)
    native = sum(verdict.operations for verdict in verdicts)
    calls = Counter(name for verdict in verdicts for name in verdict.externs)
    idle = sum(verdict.status == "pass" and not verdict.kernels for verdict in verdicts)
    share = native / max(1, native + sum(calls.values()))
    return [
        f"{len(verdicts)} run, {status['mismatch']} mismatches, {status['error']} errors, "
        f"{status['late']} late, {status['skipped']} not captured",
        f"{sum(len(verdict.excused) for verdict in verdicts)} results excused, as PyTorch's capture gives the same, "
        f"in {sum(bool(verdict.excused) for verdict in verdicts)} programs",
        f"{idle} without a kernel, {sum(verdict.breaks for verdict in verdicts)} in part in Python, "
        f"{sum(bool(verdict.unsteady) for verdict in verdicts)} too sensitive to compare in every result",
        f"{native} operations native ({share:.1%}), {sum(verdict.kernels for verdict in verdicts)} kernels",
        "left as they are: " + ", ".join(f"{name} {count}" for name, count in calls.most_common(20)),
    ]
