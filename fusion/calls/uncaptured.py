"""Warns where a fused program runs eagerly because Dynamo captures nothing of it.

Input: the compiled call of a program, and its backend, which Dynamo calls only with graphs that it captured; output:
the same call, which warns once per cause: if its first call compiles nothing, if `vmap` or a dispatch mode turns Dynamo
off, if a step of a module (`training_step`) computes without a call of a fused program, or if `forward` is called by
name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch._dynamo.decorators import skip_code  # type: ignore[attr-defined]  # PyTorch exports what it imports
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.calls.fallback import warn_once
from fusion.inspect.breaks import codes_of, other_breaks
from fusion.inspect.report import Report

_HINTS = {
    "RNN, GRU, or LSTM": "fuse what is around it",
    "sparse": "give it dense tensors (to_dense)",
    "set_runtime_stats_and_log": "wrap the fused module: DistributedDataParallel(fusion.fuse(module))",
    "as_proxy": "quantise with torchao, whose tensors are traced",
}
"""Words of Dynamo's reason → a remedy."""

_UNKNOWN = "TORCH_LOGS=graph_breaks,dynamo shows why"
_STEP = "_step"
"""The end of the names of methods that frameworks call in place of the module."""


_OWN = "_torchdynamo_wrapper_id"
"""The attribute by which Dynamo tells its own wrappers from copies of their attributes."""


class Compiling(Protocol):
    """The part of a backend that is used here: the programs that it has compiled, and since when."""

    since: float

    @property
    def reports(self) -> Sequence[Report]:
        """The reports of the graphs that it compiled."""


class _Calls:
    """The number of calls of fused programs so far, of all threads, and the number that this thread is in."""

    count = 0
    inside = threading.local()

    @classmethod
    def depth(cls) -> int:
        """Return the nesting depth of calls of fused programs in this thread."""
        return getattr(cls.inside, "depth", 0)

    @classmethod
    def by_name(cls) -> list[str] | None:
        """Return the methods that the current step of this thread has called by name; None outside of steps."""
        return getattr(cls.inside, "by_name", None)


def watched(
    call: Callable[..., object], backend: Compiling, program: Callable[..., object], name: str
) -> Callable[..., object]:
    """Return the compiled call of a program, which warns where nothing of it is captured.

    Args:
        program: the fused module, or the function as it was.
        name: of the program, for the warning.
    """
    is_first = True
    inside, transform, modes = (
        _Calls.inside,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._len_torch_dispatch_stack,
    )

    @functools.wraps(call)
    def run(*args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():  # an outer program captures it
            return call(*args, **kwargs)
        _Calls.count += 1
        depth = getattr(inside, "depth", 0)
        inside.depth = depth + 1
        try:
            if is_first or transform() is not None or modes():
                return watching(args, kwargs)
            return call(*args, **kwargs)
        finally:
            inside.depth = depth

    def watching(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        nonlocal is_first
        if off := _turned_off():
            warn_once(f"running eagerly: {name} is called {off}")
            return call(*args, **kwargs)
        if not is_first:
            return call(*args, **kwargs)
        is_first = False
        result = call(*args, **kwargs)
        if not tuple(backend.reports) and (reason := _reason(backend, program, (args, kwargs), result)):
            warn_once(f"running eagerly: Dynamo captures nothing of {name}: {reason}")
        return result

    if hasattr(run, _OWN):  # another `torch.compile` finds the program behind it
        setattr(run, _OWN, id(run))
    return run


def _turned_off() -> str:
    """Return the state of PyTorch around a call in which Dynamo compiles nothing, with a hint; else nothing."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "within a transform of torch.func: fuse the function that transforms: fusion.fuse(torch.vmap(function))"
    if _is_in_dispatch_mode():
        return "within a dispatch mode, for which every operation runs by itself: call it outside of the mode"
    return ""


def _is_in_dispatch_mode() -> bool:
    """Return whether this thread is within a dispatch mode for which Dynamo is off.

    PyTorch's own flag is the process's, and stays set where two threads leave their modes in the order in which they
    entered them.
    """
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return any(not mode.is_infra_mode() and not _ignores_compiled_code(mode) for mode in modes)


def _ignores_compiled_code(mode: TorchDispatchMode) -> bool:
    ignores = getattr(mode, "ignore_compile_internals", None)  # PyTorch 2.11 has none
    return ignores is not None and bool(ignores())


def _reason(backend: Compiling, program: Callable[..., object], given: object, result: object) -> str:
    """Return why nothing was captured; empty if nothing was computed."""
    breaks = other_breaks(codes_of(program), backend.since)
    if breaks:
        hint = next((hint for words, hint in _HINTS.items() if words in str(breaks[0])), "")
        return f"{str(breaks[0]).rstrip('.')}; {hint}" if hint else str(breaks[0])
    if not _makes_tensors(program, given, result):
        return ""
    sparse = any(_is_sparse(each) for each in pytree.tree_leaves((given, result)))
    return f"it takes sparse tensors; {_HINTS['sparse']}" if sparse else _UNKNOWN


def _is_sparse(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def _makes_tensors(program: Callable[..., object], given: object, result: object) -> bool:
    """Return whether a call returns a tensor that is none of its inputs, parameters and buffers."""
    known = {id(each) for each in pytree.tree_leaves(given)}
    if isinstance(program, torch.nn.Module):
        known |= {id(each) for each in (*program.parameters(), *program.buffers())}
    return any(isinstance(each, torch.Tensor) and id(each) not in known for each in pytree.tree_leaves(result))


def watch_steps(module: torch.nn.Module) -> None:
    """Let the steps of a fused module warn once if they compute without a call of a fused program."""
    for name in dir(type(module)):
        if name.endswith(_STEP) and not name.startswith("_"):
            method = getattr(module, name)
            if callable(method) and not getattr(torch.nn.Module, name, None):
                module.__dict__[name] = _Step(module, method)


class _Step:
    """A step of a module, as an attribute of the instance: it hides the method of the class."""

    def __init__(self, module: torch.nn.Module, method: Callable[..., object]) -> None:
        self._module, self._method = module, method
        functools.update_wrapper(self, method)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return self._method(*args, **kwargs)
        before, outer = _Calls.count, _Calls.by_name()
        by_name: list[str] = []
        _Calls.inside.by_name = by_name
        try:
            result = self._method(*args, **kwargs)
        finally:
            _Calls.inside.by_name = outer
        name = f"{type(self._module).__name__}.{self._method.__name__}"
        if by_name:
            warn_once(f"running eagerly: {name} calls {by_name[0]} by name: call the fused module, which calls it")
        elif _Calls.count == before and _makes_tensors(self._module, (args, kwargs), result):
            what = "computes without a call of the fused module: fuse the network that it calls, and call that"
            warn_once(f"running eagerly: {name} {what}")
        return result


def watch_forward(module: torch.nn.Module) -> None:
    """Let `forward` of a fused module warn once if it is called by name: only the call of the module is compiled."""
    own = vars(module).get("forward")

    def forward(*args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling() and not _Calls.depth():
            name, step = f"{type(module).__name__}.forward", _Calls.by_name()
            if step is not None:  # which says so itself, at its end
                step.append(name)
            else:
                warn_once(f"running eagerly: {name} is called by name: call the fused module, which calls it")
        return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)

    functools.update_wrapper(forward, module.forward)
    forward.__dict__[_WATCHED] = own
    skip_code(forward.__code__)  # Dynamo begins at the program's own frame, below this one
    module.__dict__["forward"] = forward


_WATCHED = "_fusion_watched"
"""The attribute of a `forward` that warns; it holds the instance's previous `forward`, else None."""


def unwatched(attributes: dict[str, object]) -> dict[str, object]:
    """Return the attributes of a module as they were before `watch_steps` and `watch_forward`."""
    before = {name: value for name, value in attributes.items() if not isinstance(value, _Step)}
    if _WATCHED in getattr(before.get("forward"), "__dict__", {}):
        own = getattr(before.pop("forward"), _WATCHED)
        before |= {} if own is None else {"forward": own}
    return before


__all__ = ["unwatched", "watch_forward", "watch_steps", "watched"]
