"""Checks the results of a configuration against the evaluator's.

Input: the tensors that a configuration wrote and the evaluator's; output: None, or a sentence.  The
measure is the error of a whole tensor, relative to its norm: configurations sum in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.lowering.ir.kernel import Kernel

_ROUNDINGS = 8.0
"""Allowed root mean square difference, in half units in the last place."""
_SUMS = 1e-4
"""Allowed difference of long sums in float32, relative to the norm."""


def wrong(kernel: Kernel, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """Return why `got` cannot be the result of `kernel`; None if it can."""
    for param, ours, theirs in zip(kernel.params, got, expected, strict=True):
        if param.written:
            if (message := wrong_tensor(param.name, ours, theirs)) is not None:
                return message
        elif not torch.equal(_numbers(ours), _numbers(theirs)):
            return f"{param.name}, which is only read, has changed"
    return None


def wrong_tensor(name: str, got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return why `got` cannot be the result called `name`; None if it can."""
    if not got.dtype.is_floating_point:
        share = (got != expected).float().mean().item() if got.numel() else 0.0
        return f"{share:.2%} of {name} is wrong" if share > 1e-4 else None  # rounded sums may compare differently
    message = _wrong_floats(got.double(), expected.double(), torch.finfo(got.dtype).eps)
    return None if message is None else f"{name}: {message}"


def _wrong_floats(ours: torch.Tensor, theirs: torch.Tensor, eps: float) -> str | None:
    special = ~torch.isfinite(theirs)
    if not torch.equal(torch.isfinite(ours), ~special):
        return "NaN or infinity at other places"
    if not torch.equal(_numbers(ours[special]), _numbers(theirs[special])):
        return "another kind of NaN or infinity"
    ours, theirs = ours[~special], theirs[~special]
    error, norm = (ours - theirs).norm().item(), theirs.norm().item()
    limit = max(_ROUNDINGS * eps / 2, _SUMS)
    return None if error <= limit * norm + 1e-30 else f"the error is {error / max(norm, 1e-30):.1e} of the norm"


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with NaN and infinities replaced by numbers, which equal themselves."""
    return torch.nan_to_num(tensor, nan=0.5, posinf=1.5, neginf=-1.5) if tensor.is_floating_point() else tensor
