"""Compares a compiled program with eager and float64: `fusion.verify`."""

from __future__ import annotations

from collections.abc import Callable

from fusion.backend import Backend
from fusion.compilation.region import compile_anew
from fusion.inspect.agreement import Agreement, ComparedRuns, Tolerance
from fusion.options import options_of, torch_settings


def verify(
    program: Callable[..., object],
    /,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    against: str = "eager",
    **settings: object,
) -> Callable[..., Agreement]:
    """Run a program in eager, in float64 and compiled, and compare: `verify(model)(*args, **kwargs)`.

    Compared are results, inputs and buffers that are changed in place, and, if results require gradients, the gradients
    of inputs and parameters.  All runs begin with equal copies, so the program and its arguments stay as they are.

    Args:
        program: an `nn.Module` or a function.
        rtol, atol: tolerances of each number, relative to the reference and absolute; where one is given the other is
            0.  By default the error against float64 may be twice eager's, and a rounding of the largest number; where
            the program does not run in float64, PyTorch's tolerances for the dtype decide.
        against: the reference of the tolerances, "eager" or "float64".
        settings: `mode`, `dynamic`, `fullgraph` and `options`, as for `fuse`.

    Returns:
        A function that takes the arguments of `program` and returns an `Agreement`.  It has `agrees`, and `values` with
            the error of each; printed, it is a list.

    Raises:
        NotComparable: the program draws random numbers, or there is no float64 run to compare with.
        TypeError: `program` cannot be called, or a setting is unknown or has the wrong type.
        ValueError: unknown mode, option or value of an option; a tolerance that is negative.

    >>> import torch
    >>> result = verify(lambda x: torch.softmax(x, -1))(torch.randn(4, 100, requires_grad=True))
    >>> result.agrees, [value.name for value in result.values]
    (True, ['result', 'gradient of input[0]'])
    """
    options, tolerance = options_of("verify", program, settings), Tolerance(rtol, atol, against)

    def run(*args: object, **kwargs: object) -> Agreement:
        runs = ComparedRuns(program, args, kwargs, tolerance)
        backend = Backend(options)
        values = runs.run(lambda copied: compile_anew(copied, backend, **torch_settings(settings)))
        return runs.agreement(values).with_reports(backend.reports)

    return run


__all__ = ["verify"]
