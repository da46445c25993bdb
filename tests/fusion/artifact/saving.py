"""Saves programs and compares what is loaded with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fusion


def saved(program: Callable[..., object], folder: Path, *args: object, **settings: Any) -> fusion.Artifact:
    """Save a program for these arguments, and load it."""
    path = folder / "program.fusion"
    fusion.save(program, path, inputs=args, **settings)
    return fusion.load(path)


def assert_like_eager(
    program: Callable[..., object],
    artifact: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
) -> None:
    """Compare results, their layouts, and what becomes of the arguments and of the program's state."""
    eager_args, given = copy.deepcopy((args, dict(kwargs or {}))), copy.deepcopy((args, dict(kwargs or {})))
    module = copy.deepcopy(program) if isinstance(program, nn.Module) else program
    with torch.no_grad():
        expected, found = module(*eager_args[0], **eager_args[1]), artifact(*given[0], **given[1])
    theirs, ours = pytree.tree_flatten(expected), pytree.tree_flatten(found)
    assert theirs[1] == ours[1]
    before, after = pytree.tree_leaves(eager_args), pytree.tree_leaves(given)
    for one, other in zip([*theirs[0], *before], [*ours[0], *after], strict=True):
        if isinstance(one, torch.Tensor):
            tolerance = {"rtol": 0.0, "atol": 0.02} if one.dtype is torch.bfloat16 else {}
            torch.testing.assert_close(other, one, equal_nan=True, **tolerance)
            assert other.stride() == one.stride()
            assert not other.requires_grad
        else:
            assert type(one) is type(other) and one == other
