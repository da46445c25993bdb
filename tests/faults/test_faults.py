"""Trials of faults, in a process of their own: children are forked from one that has a single thread.

More: `python -m tests.faults`.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fusion.inspect.explanation import Explanation
from tests.faults import trial
from tests.faults.__main__ import KINDS
from tests.faults.outcomes import Outcome, attempt, in_child
from tests.faults.programs import BODIES, Program

SECONDS = 280
"""Of one process: all trials of the default run, or those of one kind in the slow tests."""

EACH = 155
"""Trials of each kind in the slow tests."""


def tried(*arguments: str) -> str:
    """Run trials, and return what the process printed; each has to survive."""
    command = [sys.executable, "-m", "tests.faults", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_trial_of_each_kind() -> None:
    said = tried("--trials", str(len(KINDS)))
    assert all(re.search(rf"^{kind} +1 ", said, re.MULTILINE) for kind in KINDS), said
    right = re.search(rf"^all +{len(KINDS)} +(\d+)", said, re.MULTILINE)
    assert right is not None and int(right[1]) > len(KINDS) / 2, said


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_many_trials_of_a_kind(kind: str, part: int) -> None:
    share = EACH // 4 + 1
    tried("--seed", "1", "--kind", kind, "--first", str(part * share), "--trials", str(share))


# What the harness notices ---------------------------------------------------------------------------------------------

PROGRAM = Program("(x * 1.5).relu()", (3, 4))


def test_every_program_runs_and_no_draw_is_like_another() -> None:
    for body in BODIES:
        program = Program.drawn(random.Random(1), body)
        program.function()(*program.arguments())
        assert program != Program.drawn(random.Random(2), body)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]  # a setter of stand-ins for the compiler
    def replace_by(stand_in: object) -> None:
        monkeypatch.setattr("tests.faults.outcomes.compiled_by", lambda compiler, function, options: stand_in)

    return replace_by


def test_other_numbers_are_wrong(fused) -> None:  # type: ignore[no-untyped-def]
    fused(lambda x, y, i: torch.relu(x * 1.5) + 1e-3)
    assert attempt(PROGRAM).status == "wrong"


def test_a_changed_argument_is_wrong(fused) -> None:  # type: ignore[no-untyped-def]
    fused(lambda x, y, i: torch.relu(x.mul_(1.5)))
    assert attempt(PROGRAM).status == "wrong"


def test_an_unclear_error_is_wrong_and_a_clear_one_is_refused(fused) -> None:  # type: ignore[no-untyped-def]
    def raising(error: Exception):  # type: ignore[no-untyped-def]
        def run(*arguments: object) -> None:
            raise error

        return run

    fused(raising(KeyError("x")))
    assert attempt(PROGRAM).status == "wrong"
    fused(raising(MemoryError()))
    assert attempt(PROGRAM).status == "refused"


def test_eager_code_without_a_word_is_wrong(fused, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    fused(PROGRAM.function())
    monkeypatch.setattr("fusion.report", lambda compiled: Explanation(()))
    assert attempt(PROGRAM).reason == "runs eagerly without a word"


def test_a_child_that_dies_or_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.outcomes.LIMIT", 0.3)
    assert in_child(lambda: os._exit(0)).status == "crashed"
    assert in_child(lambda: time.sleep(60)).status == "hung"
    assert in_child(lambda: time.sleep(60), kill_after=0.1).status == "killed"
    assert in_child(lambda: Outcome("right")).status == "right"


def test_a_cache_that_does_not_heal_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.Trial, "attempt", lambda self, *programs, **options: Outcome("eager", "no kernel"))
    _, outcome = trial.run("none", lambda each: ("nothing", Outcome("right")), "0", tmp_path / "trial")
    assert (outcome.status, outcome.reason) == ("unhealed", "eager: no kernel")
