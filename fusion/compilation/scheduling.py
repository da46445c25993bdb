"""Schedules a Program: runs the stages PROGRAM, CLUSTERS and LAUNCHES of `fusion/stages.py`.

Input: a lowered Program; output: a `Schedule`, with a schedule for each body of chunked calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusion.dumps.trace import Trace
from fusion.lowering.ir.chunks import POINTS, Chunked
from fusion.lowering.ir.program import Program
from fusion.lowering.verify import verify_program
from fusion.runner.contexts import Planned, Scheduled, Scheduling
from fusion.runner.passes import PassLog, run_stage
from fusion.schedule import Clustering, Schedule
from fusion.schedule.kernels import KernelCall
from fusion.schedule.kernels.time import weighed_forms
from fusion.stages import CLUSTERS, LAUNCHES, PROGRAM


def schedule_program(program: Program, at: Scheduling, trace: Trace) -> Schedule:
    """Run all stages on a program; the bodies of chunked calls are scheduled in the same way."""
    trace.program(1, "program", program)
    verify_program(program, at.verified)
    clustered = run_stage(CLUSTERS, run_stage(PROGRAM, Scheduled(program), at, trace.log), at, trace.log)
    assert clustered.clustering is not None
    schedule = plan(clustered.program, clustered.clustering, at, trace.log)
    launches = [step for step in schedule.steps if isinstance(step, KernelCall)]
    choices = (*clustered.choices, *weighed_forms(launches, at.machine))
    return replace(schedule, choices=choices, bodies=dict(_bodies(clustered.program, at, trace)))


def _bodies(program: Program, at: Scheduling, trace: Trace) -> Iterator[tuple[Chunked[Program], tuple[Schedule, ...]]]:
    """Schedule the bodies of each chunked call, which contain no chunked calls."""
    calls = [node for node in program.nodes if isinstance(node, Chunked)]
    for number, chunks in enumerate(calls):
        traces = [trace.within(f"chunks_{number}_{k}") for k in range(len(chunks.bodies))]
        hints = {**(at.hints or {}), POINTS: chunks.even(chunks.traced)}
        inner = Scheduling(at.target, hints, at.measure, overrides=at.overrides)
        bodies = zip(chunks.bodies, traces, strict=True)
        yield chunks, tuple(schedule_program(body, inner, within) for body, within in bodies)


def plan(program: Program, clustering: Clustering, at: Scheduling, log: PassLog | None = None) -> Schedule:
    """Turn clusters into steps: a kernel each, or the call of an extern.

    With a target, partial results are combined in the launch that computes them, and independent kernels share a launch
    (horizontal fusion), if the target can.
    """
    planned = run_stage(LAUNCHES, Planned(program, clustering), at, log or PassLog())
    return Schedule(planned.program, planned.steps, planned.refusals)
