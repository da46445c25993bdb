"""Faults of processes: killed, interrupted, started at the same time, forked, and of several threads."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

import torch

from fusion.codegen.c import build, compiler
from fusion.codegen.cache.folders import Folder
from tests.faults.outcomes import Outcome, in_child, together
from tests.faults.programs import Program
from tests.faults.trial import Trial

TYPICAL = 0.6
"""Seconds of which a compilation takes most, on an idle machine."""


def kill(trial: Trial) -> tuple[str, Outcome]:
    """Kill the process while it compiles, after some time or where it writes."""
    if trial.rng.random() < 0.5:
        after = trial.rng.random() * TYPICAL
        return "after some time", trial.child(kill_after=after)
    where, name = trial.rng.choice(((Folder, "rename"), (Folder, "open"), (compiler, "_done"), (build, "put")))
    outcome = trial.child(partial(_dying, where, name, trial.rng.randint(1, 4)))
    return f"in {name}", Outcome("killed") if outcome.status == "crashed" else outcome


def _dying(where: object, name: str, count: int) -> None:
    """Have the process killed at a call of a function, before or after it."""
    true = getattr(where, name)
    left = [count]

    def call(*arguments: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return true(*arguments)

    setattr(where, name, call)


def concurrent_start(trial: Trial) -> tuple[str, Outcome]:
    """Start several processes on one cache directory, with equal and different programs."""
    others = [trial.program, trial.program, Program.drawn(trial.rng)][: trial.rng.randint(1, 3)]
    outcomes = together([partial(trial.attempt, each) for each in (trial.program, *others)])
    return f"{len(outcomes)} processes", next((each for each in outcomes if each.status != "right"), outcomes[0])


def interrupt(trial: Trial) -> tuple[str, Outcome]:
    """Interrupt a compilation as Ctrl-C does; the same process then compiles and runs the program."""

    def work() -> Outcome:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            first = trial.attempt()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # between the parts of an attempt, or after it; it comes once
            first = Outcome("refused")
        second = trial.strictly()
        return first if first.bad else second

    return "SIGINT", in_child(work, interrupt_after=trial.rng.random() * TYPICAL)


def threads(trial: Trial) -> tuple[str, Outcome]:
    """Compile and run the same and different functions in several threads."""
    same = trial.rng.random() < 0.5
    count = trial.rng.randint(2, 4)
    programs = [trial.program if same else Program.drawn(trial.rng) for _ in range(count)]
    gate = threading.Barrier(count)

    def work() -> Outcome:
        torch.set_num_threads(1)  # PyTorch makes its pool anew after a fork, which threads must not do at the same time
        outcomes: list[Outcome] = []

        def one(program: Program) -> None:
            gate.wait()
            outcomes.append(trial.attempt(program))

        started = [threading.Thread(target=one, args=(program,)) for program in programs]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        if len(outcomes) < count:
            return Outcome("wrong", "a thread has died")
        return next((each for each in outcomes if each.status != "right"), outcomes[0])

    return f"{'one function' if same else 'several functions'}", in_child(work)


def fork(trial: Trial) -> tuple[str, Outcome]:
    """Fork after a compilation; the parent and its child go on compiling."""
    other = Program.drawn(trial.rng)

    def work() -> Outcome:
        outcomes = [trial.strictly(), in_child(partial(trial.strictly, other)), trial.strictly(other)]
        return next((each for each in outcomes if each.status != "right"), outcomes[0])

    return "after compiling", in_child(work)


__all__ = ["concurrent_start", "fork", "interrupt", "kill", "threads"]
