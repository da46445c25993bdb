"""Selects operations, dtypes and samples: a deterministic choice from PyTorch's table.

A pair is an operation and a dtype it supports.  Of PyTorch's samples for it, the first few are taken, and the special
ones: the last, an empty tensor, a 0-d tensor, a non-contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}

LOOKED_AT = 60
"""Samples of a pair among which special ones are searched."""

SEED = 1234


@dataclass(frozen=True)
class Pair:
    """An operation of PyTorch's table and the dtype of its inputs."""

    op: OpInfo
    dtype: str

    @property
    def name(self) -> str:
        """The operation with its variant, as PyTorch's tests call it."""
        return f"{self.op.name}.{self.op.variant_test_name}" if self.op.variant_test_name else str(self.op.name)

    def differentiable(self, device: str) -> bool:
        """Return whether the operation has a gradient for this dtype."""
        return self.op.supports_autograd and DTYPES[self.dtype] in self.op.supported_backward_dtypes(device)


def pairs(dtypes: Sequence[str], device: str, only: str = "", shard: tuple[int, int] = (0, 1)) -> list[Pair]:
    """Return the pairs of some dtypes, in the table's order.

    Args:
        only: operations whose name contains it; with this name exactly, if it ends in `$`.
        shard: (k, n): every n-th operation, from the k-th on.
    """
    selected = []
    for op in list(op_db)[shard[0] :: shard[1]]:
        for dtype in dtypes:
            pair = Pair(op, dtype)
            chosen = pair.name == only[:-1] if only.endswith("$") else only in pair.name
            if chosen and DTYPES[dtype] in op.supported_dtypes(device):
                selected.append(pair)
    return selected


def samples(pair: Pair, device: str, count: int, requires_grad: bool) -> list[SampleInput]:
    """Return the first `count` samples and the special ones among the first `LOOKED_AT`, each once, seeded."""
    torch.manual_seed(SEED)
    make = pair.op.sample_inputs(device, DTYPES[pair.dtype], requires_grad=requires_grad)
    all_ = [sample for sample in islice(make, LOOKED_AT) if all(t.layout is torch.strided for t in _tensors(sample))]
    chosen = dict.fromkeys(range(min(count, len(all_))))
    chosen.update(dict.fromkeys(_odd(all_)))
    torch.manual_seed(SEED)
    chosen_samples = [all_[k] for k in chosen]
    scattered = next((s for s in chosen_samples if any(t.numel() > 1 for t in _tensors(s))), None)
    return chosen_samples if scattered is None else [*chosen_samples, scattered.noncontiguous()]


def _odd(all_: Sequence[SampleInput]) -> Iterator[int]:
    if all_:
        yield len(all_) - 1
    for kind in (_has_empty, _has_scalar):
        yield from islice((k for k, sample in enumerate(all_) if kind(sample)), 1)


def _has_empty(sample: SampleInput) -> bool:
    return any(t.numel() == 0 for t in _tensors(sample))


def _has_scalar(sample: SampleInput) -> bool:
    return isinstance(sample.input, torch.Tensor) and sample.input.ndim == 0


def _tensors(sample: SampleInput) -> list[torch.Tensor]:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
