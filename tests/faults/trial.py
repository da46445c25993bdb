"""One trial: a program, its cache directory, and what a kind of fault does to them.

A kind is a function of a trial: it draws a fault, runs the program under it, and returns what it drew and the outcome.
Then `run` runs the program again without the fault.  Under `strict` a kernel must be generated or loaded, no warning
must be given, and all entries of the cache must be what their names say.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from fusion.codegen import cache
from tests.faults.outcomes import Outcome, attempt, in_child
from tests.faults.programs import Program


@dataclass
class Trial:
    """What a kind draws from, and where it works.

    Attributes:
        place: a folder of this trial alone; the cache directory is `place / "cache"`.
        environment: variables that are set in each child; None removes one.
    """

    rng: random.Random
    place: Path
    compiler: str
    program: Program
    environment: dict[str, str | None] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.place / "cache"

    def attempt(self, program: Program | None = None, **options: object) -> Outcome:
        """Run a program in this process, with the cache and the environment of the trial."""
        variables: dict[str, str | None] = {
            "FUSION_CACHE_DIR": str(self.cache),
            "FUSION_CLOSE_CALLS": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(self.place / "inductor"),
            **self.environment,
        }
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        return attempt(program or self.program, compiler=self.compiler, seed=self.rng.randrange(1000), **options)

    def child(self, fault: Callable[[], object] = lambda: None, *, kill_after: float | None = None) -> Outcome:
        """Run the program in a child in which `fault` was called before."""

        def work() -> Outcome:
            fault()
            return self.attempt()

        return in_child(work, kill_after=kill_after)


Kind: TypeAlias = Callable[[Trial], "tuple[str, Outcome]"]
"""Returns the name of the fault that it drew, and the outcome under it."""


def run(kind: str, fault: Kind, seed: str, place: Path, compiler: str = "fusion") -> tuple[str, Outcome]:
    """Run one trial, and look whether the cache has healed; return the name of the fault and the outcome."""
    rng = random.Random(seed)
    place.mkdir(mode=0o700)
    trial = Trial(rng, place, compiler, Program.drawn(rng))
    try:
        drawn, outcome = fault(trial)
        if not outcome.bad:
            again = in_child(lambda: _healed(trial))
            if again.status != "right":
                outcome = Outcome("unhealed", f"{again.status}: {again.reason}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return f"{kind}: {drawn}", outcome


def _healed(trial: Trial) -> Outcome:
    outcome = trial.attempt(**({"strict": True} if trial.compiler == "fusion" else {}))
    if outcome.status != "right" or trial.compiler != "fusion":
        return outcome
    entries = [(folder, path) for folder in cache.FOLDERS for path in cache.kept(folder)]
    if not any(folder == "c" for folder, _ in entries):
        return Outcome("wrong", "no kernel was kept")
    for folder, path in entries:
        if path.name.startswith("."):
            continue  # of a writer that was killed
        try:
            cache.get(folder, path.name)
        except cache.Damaged:
            return Outcome("wrong", f"a damaged entry stays: {folder}/{path.name}")
    return outcome


__all__ = ["Kind", "Trial", "run"]
