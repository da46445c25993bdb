"""The runner of passes: order, conditions, checks, times and dumps; and the stages that it runs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusion
from fusion.runner.passes import Change, Pass, PassLog, Stage, in_place, run_stage
from fusion.stages import CLUSTERS, JOINT, LAUNCHES, PARTITIONED, PREVIEW_LOOPS, PREVIEW_MAPS, PROGRAM, STAGES

Numbers = Stage[list[int], int]


def stage(*passes: Pass[list[int], int]) -> Numbers:
    def check(subject: list[int], context: int) -> None:
        if any(number < 0 for number in subject):
            raise ValueError("a negative number")

    return Stage("numbers", passes, check, lambda subject: iter([("txt", str(subject))]), first=3)


APPEND = in_place("append", lambda subject, context: subject.append(context))
DOUBLE: Pass[list[int], int] = Pass("double", lambda subject, context: [2 * number for number in subject])
KEEP: Pass[list[int], int] = Pass("keep", lambda subject, context: subject)
NEVER: Pass[list[int], int] = Pass("never", lambda subject, context: [], when=lambda context: False)


class Written:
    """Dumps in memory."""

    def __init__(self) -> None:
        self.texts: list[str] = ["[1]"]
        self.names: list[str] = []

    def passed(self, number: int, name: str, texts: object) -> bool:
        ((_, text),) = texts
        changed = text != self.texts[-1]
        self.texts.append(text)
        self.names += [f"{number:02d}_{name}"] if changed else []
        return changed


def test_passes_run_in_order_where_they_apply() -> None:
    log = PassLog()
    assert run_stage(stage(APPEND, NEVER, DOUBLE, KEEP), [1], 5, log) == [2, 10]
    passes = [(each.name, each.changed) for each in log.times if each.name != "check"]
    assert passes == [("append", None), ("double", True), ("keep", False)]


def test_the_parts_that_a_pass_changes_are_named() -> None:
    named = replace(stage(APPEND, KEEP, DOUBLE), parts=lambda subject: dict(zip("abc", subject, strict=False)))
    run_stage(named, [0, 1], 5, log := PassLog())
    changes = [each.change for each in log.times if each.name != "check"]
    assert changes == [Change(added=("c",)), Change(), Change(edited=("b", "c"))]


def test_the_passes_of_a_compilation_name_nodes_clusters_and_launches() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2).sum(-1) @ y

    (graph,) = fusion.explain(program, options={"graph_cache": False})(torch.randn(8, 64), torch.randn(8)).graphs
    changes = {(each.stage, each.name): each.change for each in graph.passes if each.change}
    assert changes["program", "inline_cheap_maps"].removed == ("mul", "relu")
    assert changes["program", "inline_cheap_maps"].edited == ("sum_1",)
    assert changes["launches", "make_kernels"].added[0] == "sum_1"


def test_dumps_are_numbered_by_place_and_written_where_something_changed() -> None:
    written = Written()
    run_stage(stage(APPEND, NEVER, KEEP, DOUBLE), [1], 5, log := PassLog(written))
    assert written.names == ["03_append", "06_double"]
    assert [each.changed for each in log.times if each.name != "check"] == [True, False, True]


def test_the_subject_is_checked_after_each_pass() -> None:
    spoil: Pass[list[int], int] = Pass("spoil", lambda subject, context: [-1])
    with pytest.raises(ValueError, match="negative"):
        run_stage(stage(spoil, DOUBLE), [1], 5, log := PassLog())
    assert not any(each.name == "double" for each in log.times)


def test_passes_in_place_are_checked_at_the_end_and_where_dumped() -> None:
    spoil = in_place("spoil", lambda subject, context: subject.append(-1))
    mend = in_place("mend", lambda subject, context: subject.remove(-1))
    assert run_stage(stage(spoil, mend), [1], 5, PassLog()) == [1]
    for passes, log in (((spoil,), PassLog()), ((spoil, mend), PassLog(Written()))):
        with pytest.raises(ValueError, match="negative"):
            run_stage(stage(*passes), [1], 5, log)


def test_times_are_exclusive_and_add_up() -> None:
    log, other = PassLog(), PassLog()

    def outer(subject: list[int], context: int) -> None:
        time.sleep(0.02)
        with other.timed("build", "inner"):
            time.sleep(0.05)

    start = time.perf_counter()
    run_stage(stage(in_place("outer", outer)), [1], 5, log)
    whole = time.perf_counter() - start
    own, (inner,) = log.times[0], other.times
    assert 0.02 <= own.seconds < whole - 0.05 + 1e-3 and inner.seconds >= 0.05
    assert own.seconds + inner.seconds <= whole


def test_names_of_passes_are_distinct() -> None:
    for each in STAGES:
        names = [one.name for one in each.passes]
        assert len({*names}) == len(names) > 1, each.name
    assert all(each in PROGRAM.passes for stage in (PREVIEW_MAPS, PREVIEW_LOOPS) for each in stage.passes)
    follows = ((JOINT, PARTITIONED), (PROGRAM, CLUSTERS), (CLUSTERS, LAUNCHES))
    assert all(later.first == earlier.first + len(earlier.passes) for earlier, later in follows)


def test_a_report_has_the_time_of_every_pass_of_a_training_step(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.t(), -1).sum()

    fused = fusion.fuse(f, options={"strict": True, "dump": tmp_path})
    start = time.perf_counter()
    fused(torch.randn(64, 64, requires_grad=True)).backward()
    whole = time.perf_counter() - start
    forward, backward = fusion.report(fused).graphs
    ran = [{(each.stage, each.name) for each in graph.passes} for graph in (forward, backward)]
    expected = {(each.name, one.name) for each in (PROGRAM, CLUSTERS, LAUNCHES) for one in each.passes}
    always = expected - {("program", "leave_lone_products")}
    assert always <= ran[0] and always <= ran[1]
    if ("program", "leave_lone_products") in ran[0]:  # the library's products are faster, if nothing is fused with them
        assert {("preview_maps", "inline_cheap_maps"), ("preview_loops", "chain_products")} <= ran[0]
        assert list(tmp_path.glob("*_forward/preview/01_program.txt"))
    assert {("joint", "partition"), ("captured", "inline_regions"), ("autograd", "trace")} <= ran[0]
    assert not {stage for stage, _ in ran[1]} & {"captured", "joint", "autograd"}
    assert {("build", "wait"), ("build", "generate"), ("run", "splice")} <= ran[1]
    assert sum(each.seconds for graph in (forward, backward) for each in graph.passes) <= whole
    folders = [path.name[4:] for path in sorted(tmp_path.iterdir())]
    assert folders == ["captured", "joint", "forward", "backward"]
    assert list(tmp_path.glob("*_joint/*_eliminate_*.py")) or list(tmp_path.glob("*_joint/*_drop_*.py"))
    assert all((folder / "00_graph.py").exists() for folder in tmp_path.iterdir())
