"""Refusals: launches of kernels that turn out at the call not to be there.

Some targets build a binary when the sizes, alignments or the device of a call first ask for it, and load each when it
is first launched.  Either may fail: a compiler that gives up, a device with less shared memory than its like.  By then
others have run, and may have changed what the caller gave, so that a graph cannot begin anew.  Input: a launcher;
output: one that has the evaluator do what was refused, which it can on any device, and says why.
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
    """`launch`, or the evaluator where that cannot be, once `refused` was told; what launches costs nothing more.

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
