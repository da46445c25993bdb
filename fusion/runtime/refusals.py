"""Fallback for launches that turn out to be impossible at the call.

Some targets build a binary when the sizes, alignments or the device of a call first require it, and load each when it
is first launched.  Either may fail: a compiler error, a device with less shared memory than others of its kind.  By
then earlier kernels have run, and may have changed inputs, so that the graph cannot be restarted.  Input: a launcher;
output: one that runs the evaluator for a refused launch, on any device, and reports why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from fusion.codegen.target import LateLauncher, Launcher
from fusion.lowering.errors import BuildError
from fusion.lowering.interpret import run_kernel
from fusion.lowering.kernel import Kernel


def or_evaluated(launch: Launcher, kernel: Kernel, refused: Callable[[BuildError], object] | None) -> Launcher:
    """Return `launch`, with the evaluator as fallback after `refused` was called; successful launches cost no more.

    Without `refused` the refusal is raised.
    """
    if not isinstance(launch, LateLauncher):
        return launch
    if refused is None:
        return launch.or_else(None)
    count, tell = len(kernel.params), refused

    def evaluate(refusal: BuildError, args: Sequence[object]) -> None:
        tell(refusal)
        tensors, sizes = cast("Sequence[torch.Tensor]", args[:count]), cast("Sequence[int]", args[count:])
        run_kernel(kernel, tensors, sizes)

    return launch.or_else(evaluate)
