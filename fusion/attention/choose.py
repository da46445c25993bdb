"""Who computes attention that was asked for in one piece: the library's kernel, or kernels generated for its parts.

Input: Dynamo's graph, in which the calls whose parts are predicted to be faster are replaced by them; output:
 a `Choice` for each call, with both prices.  What is not understood stays the library's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from fusion.attention.call import Call, calls, read
from fusion.attention.price import generated_time, least_time, library_kernel, library_time
from fusion.codegen.target import Target
from fusion.graph_cache.form import Unwritten, write
from fusion.graph_cache.form import read as read_text
from fusion.graph_cache.key import key_for
from fusion.graph_cache.store import get, put
from fusion.lowering.attention import attention
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import BuildError, Origin, Unsupported


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes one call.

    Attributes:
        kernel: the library's kernel for it; empty if unknown.
        library_us: predicted microseconds of that kernel, None if unknown.
        generated_us: predicted microseconds of what would be generated, None if nothing would be.
        reason: why there is nothing to choose between.
        lasting: would the next process find the same?

    >>> print(Choice(Origin("out", "", "model.py:3"), True, "efficient", 90.0, 41.5))
    attention out (model.py:3): generated, 41.5 µs against 90.0 µs of the library's efficient kernel
    """

    origin: Origin
    generated: bool
    kernel: str = ""
    library_us: float | None = None
    generated_us: float | None = None
    reason: str = ""
    lasting: bool = True

    def __str__(self) -> str:
        kernel = f"the library's {self.kernel} kernel".replace("  ", " ")
        if self.reason:
            return f"attention {self.origin}: {kernel} ({self.reason})"
        parts, whole = f"{self.generated_us:.1f} µs", f"{self.library_us:.1f} µs"
        if self.generated:
            return f"attention {self.origin}: generated, {parts} against {whole} of {kernel}"
        return f"attention {self.origin}: {kernel}, {whole} against {parts} generated"


class Chooser:
    """Chooses for whole graphs; calls alike are priced once.

    Args:
        target_of: the target that serves a device.
        strict: raise where a trial fails by a defect, rather than leave the call to the library and say so.
        kept: take what an earlier process chose from the cache directory.
    """

    def __init__(
        self, target_of: Callable[[torch.device], Target], *, strict: bool = False, kept: bool = False
    ) -> None:
        self._target_of, self._strict, self._kept = target_of, strict, kept
        self._known: dict[tuple[object, ...], Choice] = {}
        self._lock = threading.Lock()

    def __call__(self, graph: fx.GraphModule) -> tuple[Choice, ...]:
        """Choose for every call in `graph`, and replace those that are to be generated."""
        with unset_fake_temporarily():
            return tuple(self._choices(graph))

    def _choices(self, graph: fx.GraphModule) -> Iterator[Choice]:
        changed: set[fx.GraphModule] = set()
        for found in list(calls(graph)):
            node = found.node
            mode = FakeTensorMode(allow_non_fake_inputs=True)  # the library makes numbers of its own
            origin = origin_of(node)
            try:
                call = read(found, mode)
            except Exception as failure:  # as in `choose`
                if self._strict and not isinstance(failure, Unsupported):
                    raise
                yield Choice(origin, False, reason=_reason(failure))
                continue
            choice = self._choice(call, origin)
            if choice.generated:
                node.target = attention
                node.kwargs = {**node.kwargs, "order": call.order}
                owner = node.graph.owning_module
                if owner is not None:
                    changed.add(owner)
            yield choice
        for module in changed:
            module.recompile()

    def _choice(self, call: Call, origin: Origin) -> Choice:
        target = self._target_of(call.query.device)
        key = (target.name, target.numerics, *call.signature())
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = self._chosen(call, origin, target)
            with self._lock:
                self._known[key] = known
        return replace(known, origin=origin)

    def _chosen(self, call: Call, origin: Origin, target: Target) -> Choice:
        """What an earlier process chose, or else what is chosen now."""
        key = _key(call, target) if self._kept else ""
        with suppress(Exception):  # whatever is found there, it is not what was written
            text = get(key) if key else None
            found = None if text is None else read_text(text, KINDS)
            if isinstance(found, Choice):
                return found
        made = choose(call, origin, target, strict=self._strict)
        if key and made.lasting:
            with suppress(BuildError):  # the next process chooses again
                put(key, write(made, KINDS))
        return made


KINDS = {kind.__name__: kind for kind in (Choice, Origin)}
"""What a choice is kept as."""


def _key(call: Call, target: Target) -> str:
    """What a choice is found by; empty where that cannot be told."""
    kernels = ("flash", "mem_efficient", "cudnn")
    try:
        enabled = [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in kernels]
        return key_for(target, "attention", enabled, [_named(part) for part in call.signature()])
    except Unwritten:
        return ""


def _named(part: object) -> object:
    """A part of a signature with PyTorch's functions by their names, where C defines them."""
    if isinstance(part, tuple):
        return tuple(map(_named, part))
    name = getattr(part, "__name__", "")
    return f"torch.{name}" if isinstance(name, str) and getattr(torch, name, None) is part else part


def choose(call: Call, origin: Origin, target: Target, *, strict: bool = False) -> Choice:
    """Price one call on `target`, and choose; see `Chooser` for `strict`."""
    capabilities = target.capabilities
    if "dot" not in capabilities.fold_ops:
        return Choice(origin, False, reason=f"{target.name} generates no products")
    kernel = ""
    try:
        kernel = library_kernel(call, target)
        library = library_time(call, kernel, capabilities)
        least = least_time(call, capabilities)
        if least >= library:
            return Choice(origin, False, kernel, library, least)
        generated = generated_time(call, target)
    except Exception as failure:  # whatever is wrong with the parts, the library's kernel is right
        if strict and not isinstance(failure, Unsupported):
            raise
        return Choice(origin, False, kernel, reason=_reason(failure), lasting=isinstance(failure, Unsupported))
    return Choice(origin, generated < library, kernel, library, generated)


def _reason(failure: Exception) -> str:
    return str(failure) if isinstance(failure, Unsupported) else f"{type(failure).__name__}: {failure}"
