"""Records measurements, so that a second process does not repeat them.

Reads and writes a `Tuning` as JSON in the cache directory.  The key covers everything that decides: the text of every
configuration, the device and the versions.  A damaged record counts as absent.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from fusion.codegen.cache import Damaged, digest, get, put
from fusion.lowering.errors import BuildError


@dataclass(frozen=True, slots=True)
class Trial:
    """One alternative, with its predicted and its measured time in microseconds.

    `refused` says why it may not win: it could not be built, or its results were wrong.
    """

    name: str
    predicted: float
    measured: float | None = None
    refused: str = ""

    @property
    def microseconds(self) -> float:
        """The measured time, or else the predicted one; infinite if it is refused."""
        if self.refused:
            return math.inf
        return self.predicted if self.measured is None else self.measured

    def __str__(self) -> str:
        if self.refused:
            return f"{self.name}: refused, {self.refused}"
        measured = "" if self.measured is None else f", measured {self.measured:.1f} µs"
        return f"{self.name}: predicted {self.predicted:.1f} µs{measured}"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The trials of one subject, and the winner.  `reason` says why nothing was tried."""

    subject: str
    trials: tuple[Trial, ...] = ()
    chosen: int = 0
    reason: str = ""

    def __str__(self) -> str:
        marks = ("→" if number == self.chosen else " " for number in range(len(self.trials)))
        lines = [f"  {mark} {trial}" for mark, trial in zip(marks, self.trials, strict=True)]
        done = "timed" if any(trial.measured is not None for trial in self.trials) else "weighed"
        head = f"{self.subject}: not timed, {self.reason}" if self.reason else f"{self.subject}: {done}"
        return "\n".join([head, *lines])


def key_of(device: torch.device, target: str, texts: Sequence[str]) -> str:
    """Return the key of a record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = str(torch.get_num_threads()) if device.type == "cpu" else ""
    return digest(target, name, threads, torch.__version__, _triton(), *texts)


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def read(key: str, count: int) -> Tuning | None:
    """Return the record of `key`, with `count` trials, or None.

    Raises:
        BuildError: the folder of records is refused.
    """
    try:
        content = get("tuned", _name(key))
        return None if content is None else _tuning(content, count)
    except Damaged:
        return None


def write(key: str, tuning: Tuning) -> None:
    """Store `tuning`, if that is possible: otherwise the next process measures again."""
    with suppress(BuildError):
        put("tuned", _name(key), json.dumps(asdict(tuning), indent=1).encode() + b"\n")


def _name(key: str) -> str:
    return f"{key}.json"


def _tuning(content: bytes, count: int) -> Tuning:
    """Return the tuning of an entry.

    Raises:
        Damaged: it holds something else, or names a winner that was refused.
    """
    try:
        record = json.loads(content)
        trials = tuple(_trial(**trial) for trial in record["trials"])
        chosen = int(record["chosen"])
        if len(trials) != count or chosen < 0 or not math.isfinite(trials[chosen].microseconds):
            raise ValueError(f"trial {chosen} cannot have won")
        return Tuning(str(record["subject"]), trials, chosen)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise Damaged from error


def _trial(name: str, predicted: float, measured: float | None, refused: str) -> Trial:
    return Trial(str(name), float(predicted), None if measured is None else float(measured), str(refused))
