"""Hooks into Dynamo's tracing for this backend: prewarms targets and corrects PyTorch's shape functions.

The devices of a graph are known once it is traced; that this process uses an accelerator is known before, so the parts
of an accelerator's target that are needed once per process are prepared when Dynamo begins.  Shapes that PyTorch traces
wrongly (`fusion.lowering.aten.mistraced`) are corrected from the start, causal hints of masks are trusted
(`fusion.dynamo.causal_hint`), and elements that nothing reads are kept where their indices may be refused
(`fusion.dynamo.unused_results`).  A terminal shows the progress of a long compilation.

Dynamo traces before it calls a backend, and its global state is the process's: there is no hook for one backend alone.
So importing this module wraps Dynamo's function that compiles a frame.  The wrapper enters and leaves the corrections
if the frame is compiled for this backend, and else passes the call on.  A user's function that passes graphs on to this
backend counts as another backend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from types import CodeType, MethodType
from typing import TypeVar, cast

import torch
from torch._dynamo import convert_frame
from typing_extensions import ParamSpec

from fusion.calls.waiting import waiting
from fusion.codegen.targets import prepare
from fusion.dynamo.causal_hint import masks_as_given
from fusion.dynamo.unused_results import unused_elements_kept
from fusion.lowering.aten.mistraced import traced_as_eager

Kind = TypeVar("Kind", bound=Callable[..., object])
Given = ParamSpec("Given")
Result = TypeVar("Result")

_OURS: list[Callable[..., object]] = []


def ours(backend: Kind) -> Kind:
    """Decorate a function or class as a backend for which this module's hooks apply."""
    _OURS.append(backend)
    return backend


def is_ours(backend: object) -> bool:
    """Return whether this backend, or a backend that it wraps, is decorated with `ours`."""
    while backend is not None:
        if any(backend is each or (isinstance(each, type) and isinstance(backend, each)) for each in _OURS):
            return True
        backend = _wrapped(backend)
    return False


def _wrapped(backend: object) -> object:
    """Return the backend that PyTorch, or a `partial`, has wrapped; None if there is none."""
    if isinstance(backend, torch._TorchCompileWrapper):
        return backend.compiler_fn
    if isinstance(backend, partial):
        return backend.func
    if isinstance(backend, MethodType):  # of the class that splits graphs for distributed data parallel
        return getattr(backend.__self__, "backend_compile_fn", None)
    return getattr(backend, "_torchdynamo_orig_backend", None)


def begin() -> None:
    """Prepare the target of an accelerator that is in use.  Errors are raised again by the first use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        with suppress(Exception):
            prepare("cuda")


def _around(compile_frame: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wrap Dynamo's function that compiles a frame, with this module's hooks."""
    names = list(inspect.signature(compile_frame).parameters)
    place, code_place = names.index("compiler_fn"), names.index("code")

    @wraps(compile_frame)
    def compile_for(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if isinstance(skip := kwargs.get("skip"), int):  # Dynamo's own frames on the stack, which its log leaves out
            kwargs["skip"] = skip + 1
        if not is_ours(args[place] if place < len(args) else kwargs["compiler_fn"]):
            return compile_frame(*args, **kwargs)
        begin()
        code = cast("CodeType", args[code_place] if code_place < len(args) else kwargs["code"])
        with _shown(code), traced_as_eager(), masks_as_given(), unused_elements_kept():
            return compile_frame(*args, **kwargs)

    return compile_for


def _shown(code: CodeType) -> AbstractContextManager[None]:
    return waiting(f"compiling {getattr(code, 'co_qualname', code.co_name)}", "capturing")  # Python 3.10 has no path


convert_frame._compile = _around(convert_frame._compile)


__all__ = ["begin", "is_ours", "ours"]
