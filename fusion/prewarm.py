"""Prewarming and corrections that hold while Dynamo traces for this backend, and for no other.

Which devices a graph has tensors of is known once it is traced; that this process uses an accelerator is known before,
so the parts of an accelerator's target that are needed once in a process are prepared when Dynamo begins.  Shapes that
PyTorch traces wrongly (`fusion.lowering.mistraced`) are corrected from the start, and masks are taken as they are given
(`fusion.dynamo.causal_hint`).

Dynamo traces before it calls a backend, and what it looks up meanwhile belongs to the process: it has no place to say
something for one backend alone.  So importing this module puts a function around the one by which Dynamo compiles a
frame.  That one sees for whom, and enters and leaves what holds for this backend; for any other it only passes the call
on.  A function of the user's that hands graphs on to this backend is another one to Dynamo.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch._dynamo import convert_frame

from fusion.codegen.targets import prepare
from fusion.dynamo.causal_hint import masks_as_given
from fusion.lowering.mistraced import traced_as_eager

Kind = TypeVar("Kind", bound=Callable[..., object])

_OURS: list[Callable[..., object]] = []


def ours(backend: Kind) -> Kind:
    """Trace for this backend, a function or a class of them, as this module says."""
    _OURS.append(backend)
    return backend


def is_ours(backend: object) -> bool:
    """Is this backend, or what it wraps, one of ours?"""
    while backend is not None:
        if any(backend is each or (isinstance(each, type) and isinstance(backend, each)) for each in _OURS):
            return True
        backend = _wrapped(backend)
    return False


def _wrapped(backend: object) -> object:
    """What PyTorch has wrapped in a backend, or a `partial`; None if there is nothing."""
    if isinstance(backend, torch._TorchCompileWrapper):
        return backend.compiler_fn
    if isinstance(backend, partial):
        return backend.func
    if isinstance(backend, MethodType):  # of what parts graphs for distributed data
        return getattr(backend.__self__, "backend_compile_fn", None)
    return getattr(backend, "_torchdynamo_orig_backend", None)


def begin() -> None:
    """Have the target of an accelerator that is in use begin.  Whoever needs what fails then is told."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # PyTorch's own
        with suppress(Exception):
            prepare("cuda")


def _around(compile_frame: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's function that compiles a frame for a backend, with what holds while that is ours."""
    place = list(inspect.signature(compile_frame).parameters).index("compiler_fn")

    @wraps(compile_frame)
    def compile_for(*args: Any, **kwargs: Any) -> Any:
        if "skip" in kwargs:  # so many frames of the stack are Dynamo's own, which it logs no more than this one
            kwargs["skip"] += 1
        if not is_ours(args[place] if place < len(args) else kwargs["compiler_fn"]):
            return compile_frame(*args, **kwargs)
        begin()
        with traced_as_eager(), masks_as_given():
            return compile_frame(*args, **kwargs)

    return compile_for


convert_frame._compile = _around(convert_frame._compile)


__all__ = ["begin", "is_ours", "ours"]
