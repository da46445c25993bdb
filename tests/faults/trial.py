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
        others: programs whose entries were harmed, too, and have to heal.
    """

    rng: random.Random
    place: Path
    compiler: str
    program: Program
    environment: dict[str, str | None] = field(default_factory=dict)
    others: list[Program] = field(default_factory=list)

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

    def strictly(self, program: Program | None = None) -> Outcome:
        """Run a program in this process, where nothing may be left to eager."""
        return self.attempt(program, **({"strict": True} if self.compiler == "fusion" else {}))

    def child(self, fault: Callable[[], object] = lambda: None, *, kill_after: float | None = None) -> Outcome:
        """Run the program in a child in which `fault` was called before."""

        def work() -> Outcome:
            fault()
            return self.attempt()

        return in_child(work, kill_after=kill_after)


WITHOUT_TRACE = ("fork", "guard", "names")
"""Kinds that leave nothing behind which could have to heal, and run strictly themselves."""

Kind: TypeAlias = Callable[[Trial], "tuple[str, Outcome]"]
"""Returns the name of the fault that it drew, and the outcome under it."""


def run(kind: str, fault: Kind, seed: str, place: Path, compiler: str = "fusion") -> tuple[str, Outcome]:
    """Run one trial, and look whether the cache has healed; return the name of the fault and the outcome.

    Args:
        kind: the name of the kind.
        seed: of all that is drawn.
        place: a folder that is not there yet.
        compiler: "fusion", or another one to compare with.
    """
    rng = random.Random(seed)
    place.mkdir(mode=0o700)
    trial = Trial(rng, place, compiler, Program.drawn(rng))
    try:
        drawn, outcome = fault(trial)
        if not outcome.bad and kind not in WITHOUT_TRACE:
            again = in_child(lambda: _healed(trial))
            if again.status != "right":
                outcome = Outcome("unhealed", f"{again.status}: {again.reason}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return f"{kind}: {drawn}", outcome


def _healed(trial: Trial) -> Outcome:
    outcome = trial.strictly()
    if outcome.status != "right" or trial.compiler != "fusion":
        return outcome
    for other in trial.others:
        trial.strictly(other)
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
