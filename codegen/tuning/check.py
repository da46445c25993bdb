"""Check: are the numbers of a configuration right?

Input: what a configuration has written and what the evaluator wrote; output: None, or a sentence.  The measure is the
error of a whole tensor, relative to its norm: configurations sum up in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.lowering.kernel import Kernel

_ROUNDINGS = 8.0
"""Half units in the last place that the numbers of a tensor may differ by, root mean square."""
_SUMS = 1e-4
"""The same for long sums in float32, relative to the norm."""


def wrong(kernel: Kernel, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """Why `got` cannot be what `kernel` computes; None if it can."""
    for param, ours, theirs in zip(kernel.params, got, expected, strict=True):
        if param.written:
            if (found := wrong_tensor(param.name, ours, theirs)) is not None:
                return found
        elif not torch.equal(_numbers(ours), _numbers(theirs)):
            return f"{param.name}, which is only read, has changed"
    return None


def wrong_tensor(name: str, got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Why `got` cannot be the result that is called `name`; None if it can."""
    if not got.dtype.is_floating_point:
        share = (got != expected).float().mean().item() if got.numel() else 0.0
        return f"{share:.2%} of {name} is wrong" if share > 1e-4 else None  # rounded sums may compare otherwise
    found = _wrong_floats(got.double(), expected.double(), torch.finfo(got.dtype).eps)
    return None if found is None else f"{name}: {found}"


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
    """The same with NaN as a number that equals itself."""
    return torch.nan_to_num(tensor, nan=0.5, posinf=1.5, neginf=-1.5) if tensor.is_floating_point() else tensor
