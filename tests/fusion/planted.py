"""Plants faults in generated code, in built kernels and in passes, for tests of what finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import fusion.codegen.c.target
from fusion import stages
from fusion.codegen import targets
from fusion.codegen.c.target import CTarget
from fusion.compilation import scheduling
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Program
from fusion.runner.contexts import Scheduled, Scheduling


def plant_in_results(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Let results of kernels with an operation in their name be a thousandth too large."""
    build: Callable[..., Callable[..., object]] = fusion.codegen.c.target.build_kernel

    def built(kernel: Kernel, source: str, unkept: Any) -> Callable[..., object]:
        launch = build(kernel, source, unkept)

        def wrong(*args: Any) -> None:
            launch(*args)
            args[-1].mul_(1.001)

        return wrong if operation in kernel.name else launch

    monkeypatch.setattr(fusion.codegen.c.target, "build_kernel", built)
    monkeypatch.setattr(targets, "_builders", {})  # builds of this test are not for others


def plant_in_text(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    """Emit another text in place of `right`, where that occurs."""
    emit = CTarget.emit
    monkeypatch.setattr(CTarget, "emit", lambda self, kernel: emit(self, kernel).replace(right, wrong))


def plant_in_pass(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Program], Program]) -> None:
    """Let a pass over the Program change it once more."""

    def run(scheduled: Scheduled, at: Scheduling) -> Scheduled:
        after: Scheduled = passes[name].run(scheduled, at)
        return after.changed(change(after.program))

    passes = {each.name: each for each in stages.PROGRAM.passes}
    wrong = tuple(replace(each, run=run) if each.name == name else each for each in stages.PROGRAM.passes)
    monkeypatch.setattr(scheduling, "PROGRAM", replace(stages.PROGRAM, passes=wrong))
