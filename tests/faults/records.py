"""Faults of what was measured: the speeds of this CPU, and the times of alternatives."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path

import torch

from fusion.codegen import calibration
from fusion.codegen.c.build import cpu_identity
from fusion.codegen.calibration import DeviceSpeeds
from fusion.codegen.tuning import record
from fusion.codegen.tuning.record import Trial as Timed
from fusion.codegen.tuning.record import Tuning
from fusion.lowering.errors import BuildError
from tests.faults.entries import HARMS
from tests.faults.outcomes import Outcome, in_child
from tests.faults.trial import Trial

KEY = "a subject"


def records(trial: Trial) -> tuple[str, Outcome]:
    """Harm the record of a device or of times, or change one number of it; then run the program, and measure again."""
    figures, tuning = _figures(trial.rng), _tuning(trial.rng)

    def measured() -> Outcome:
        outcome = trial.attempt()
        _write(figures, tuning)
        return outcome

    in_child(measured)
    folder = trial.rng.choice(("devices", "tuned"))
    harm = trial.rng.choice((*HARMS, another_number))
    for path in sorted((trial.cache / folder).glob("[!.]*")):
        with suppress(FileNotFoundError):  # exchanged with itself
            harm(path, trial.rng)

    def work() -> Outcome:
        outcome = trial.attempt()
        for attempt in ("read", "measured again"):
            got = _read(len(tuning.trials))
            known = {"read": (None, figures, tuning), "measured again": (figures, tuning)}[attempt]
            if not all(each in known for each in got):
                return Outcome("unhealed" if attempt == "measured again" else "wrong", f"{attempt}: {got}")
            _write(figures, tuning)
        return outcome

    return f"{folder} {harm.__name__}", in_child(work)


def another_number(path: Path, rng: random.Random) -> None:
    """Change a digit."""
    text = path.read_bytes()
    digits = [match.start() for match in re.finditer(rb"\d", text)]
    at = rng.choice(digits)
    path.write_bytes(text[:at] + str(rng.randrange(10)).encode() + text[at + 1 :])


def _write(figures: DeviceSpeeds, tuning: Tuning) -> None:
    with suppress(BuildError):
        calibration.keep(figures, cpu_identity(), torch.get_num_threads())
    record.write(KEY, tuning)


def _read(count: int) -> tuple[DeviceSpeeds | None, Tuning | None]:
    try:
        tuning = record.read(KEY, count)
    except BuildError:
        tuning = None
    return calibration.kept(cpu_identity(), torch.get_num_threads()), tuning


def _figures(rng: random.Random) -> DeviceSpeeds:
    def speed() -> float:
        return rng.uniform(1e3, 1e6)

    return DeviceSpeeds("a CPU", rng.uniform(1, 50), ((1e6, speed()),), speed(), {2: speed(), 4: speed()})


def _tuning(rng: random.Random) -> Tuning:
    trials = tuple(Timed(f"way {k}", rng.uniform(1, 9), rng.uniform(1, 9)) for k in range(rng.randint(1, 4)))
    return Tuning("a subject", trials, rng.randrange(len(trials)))


__all__ = ["records"]
