"""Two processes that share a gloo group and run scenarios, one after the other, for the tests of a module."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIME_LIMIT = 240
"""Seconds after which a scenario counts as hung."""

Scenario = Callable[..., object]


class Pair:
    """The processes.  A scenario is a function of a module, which both call with the same arguments."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def run(self, scenario: Scenario, *args: object) -> list[Any]:
        """The result of each process; the traceback of the first that fails is raised."""
        for connection in self._connections:
            connection.send((scenario, args))
        answers = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(TIME_LIMIT), f"process {rank} hangs"
            answers.append(connection.recv())
        for rank, (failure, _) in enumerate(answers):
            assert not failure, f"process {rank} failed:\n{failure}"
        return [result for _, result in answers]


@contextmanager
def started(folder: Path) -> Iterator[Pair]:
    """Within, the processes run."""
    context = mp.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=_serve, args=(rank, theirs, folder)) for rank, (_, theirs) in enumerate(ends)]
    for process in processes:
        process.start()
    try:
        yield Pair([ours for ours, _ in ends])
    finally:
        for ours, _ in ends:
            ours.close()
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, connection: Connection, folder: Path) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIME_LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2, timeout=limit)
    while True:
        try:
            scenario, args = connection.recv()
        except EOFError:
            break
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            connection.send(("", scenario(*args)))
        except BaseException:
            connection.send((traceback.format_exc(), None))
    dist.destroy_process_group()
