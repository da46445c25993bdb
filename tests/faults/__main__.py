"""Runs seeded trials of faults, and prints what became of them: `python -m tests.faults --seed N --trials N --kind K`.

Trial K of seed S draws the same fault on every machine; when a process is killed depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch._dynamo  # also what it has for its logs
import torch.hub

from tests.faults import entries, inputs, processes, records, surroundings
from tests.faults.outcomes import Outcome, attempt
from tests.faults.programs import BODIES, Program
from tests.faults.trial import Kind, run
from tests.torch_logs import leave_out_logs

WARMED = 2
"""Bodies that are compiled before the first trial; the others import next to nothing more."""

KINDS: dict[str, Kind] = {
    "kill": processes.kill,
    "concurrent": processes.concurrent_start,
    "eviction": entries.eviction,
    "corruption": entries.corruption,
    "records": records.records,
    "permissions": entries.permissions,
    "disk": surroundings.disks,
    "compiler": surroundings.compilers,
    "interrupt": processes.interrupt,
    "threads": processes.threads,
    "fork": processes.fork,
    "guard": inputs.guard_pages,
    "names": inputs.names,
    "surroundings": surroundings.environments,
}

COLUMNS = ("right", "eager", "refused", "killed", "wrong", "crashed", "hung", "unhealed")


def main(arguments: Sequence[str]) -> int:
    """Run the requested trials; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=112, help="how many, of all kinds together")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument(
        "--kind", action="append", choices=sorted(KINDS), help="only this kind; several take turns, in the order given"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--compiler", choices=("fusion", "inductor", "eager"), default="fusion")
    parser.add_argument("--faults", action="store_true", help="a row for each fault, not for each kind")
    options = parser.parse_args(arguments)
    warm(options.compiler)
    kinds = options.kind or list(KINDS)
    trials = [(kinds[k % len(kinds)], k) for k in range(options.first, options.first + options.trials)]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failed = False
    for number, drawn, outcome in shared(trials, options):
        row = drawn if options.faults else drawn.partition(":")[0]
        counts[row][outcome.status] += 1
        if outcome.bad:
            failed = True
            print(f"{options.seed}/{number} {drawn}: {outcome.status}: {outcome.reason}", flush=True)
    print("\n".join(table(counts)))
    return int(failed or sum(map(Counter.total, counts.values())) != len(trials))


def warm(compiler: str) -> None:
    """Import what a compilation imports, without anything that the trials' programs find later."""
    torch.set_num_threads(1)
    leave_out_logs()
    if hasattr(torch.hub.tqdm, "set_lock"):  # tqdm is installed
        # `torch.fx.Interpreter` makes a bar in each run.  By default bars take a lock that forked processes share: a
        # child that is killed while it holds the lock would stop all others.
        torch.hub.tqdm.set_lock(threading.RLock())
    with tempfile.TemporaryDirectory(prefix="fusion-faults-") as folder:
        os.environ["FUSION_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ.pop("FUSION_GRAPH_CACHE", None)
        for body in BODIES[:WARMED]:
            outcome = attempt(Program.drawn(random.Random(body), body), compiler=compiler)
            assert outcome.status == "right", outcome.reason
    gc.collect()
    gc.freeze()  # a collection would copy all pages that a child shares with this process


def shared(trials: Sequence[tuple[str, int]], options: argparse.Namespace) -> Iterator[tuple[int, str, Outcome]]:
    """Yield number, fault and outcome of each trial, from several processes."""
    with tempfile.TemporaryDirectory(prefix="fusion-faults-") as folder:
        streams = [_worker(trials[k :: options.jobs], options, Path(folder)) for k in range(options.jobs)]
        for pid, stream in streams:
            with os.fdopen(stream) as lines:
                for line in lines:
                    number, drawn, status, reason = json.loads(line)
                    yield number, drawn, Outcome(status, reason)
            os.waitpid(pid, 0)


def _worker(trials: Iterable[tuple[str, int]], options: argparse.Namespace, folder: Path) -> tuple[int, int]:
    """Fork a process that runs trials; return its number and the pipe on which their outcomes arrive."""
    read, write = os.pipe()
    pid = os.fork()
    if pid != 0:
        os.close(write)
        return pid, read
    try:
        for kind, number in trials:
            seed = f"{options.seed}/{kind}/{number}"
            drawn, outcome = run(kind, KINDS[kind], seed, folder / str(number), options.compiler)
            line = json.dumps([number, drawn, outcome.status, outcome.reason])
            os.write(write, f"{line}\n".encode())
    except BaseException as error:
        print(f"a worker has failed: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def table(counts: dict[str, Counter[str]]) -> list[str]:
    """Return the rows of kinds, or faults, and outcomes."""
    rows = [("", "tried", *COLUMNS)]
    total = Counter[str]()
    for name, row in sorted(counts.items()):
        rows.append((name, str(row.total()), *(str(row[column]) for column in COLUMNS)))
        total += row
    rows.append(("all", str(total.total()), *(str(total[column]) for column in COLUMNS)))
    width = max(len(row[0]) for row in rows)
    return [row[0].ljust(width) + "".join(cell.rjust(10) for cell in row[1:]) for row in rows]


if __name__ == "__main__":
    begun = time.monotonic()
    code = main(sys.argv[1:])
    print(f"{time.monotonic() - begun:.0f} s")
    sys.exit(code)
