"""Caches AOTAutograd's results for the regions that Dynamo captured, for later processes.

PyTorch caches AOTAutograd's results itself, for inductor: mutated inputs, results that are views, saved tensors, guards
on sizes.  Input: such a result, once forward (and backward, if any) is compiled and cached (`WarmStart`); output, at
the next start: the result with the compiled graphs.  Nothing is traced, partitioned or lowered then.  Three functions
of PyTorch's cache are replaced, and call the originals for regions of others: PyTorch's own key imports all of
inductor, and takes operations of the program's own for known.  PyTorch pickles its results; these are kept as data
(`traced.py`), with their guards as text that is parsed (`size_guards.py`), so that nothing runs while they are read.

Not cached, with a note in the report, are regions that cannot be serialised in full (`region_key.py`, `traced.py`),
whose inputs overlap where one is mutated, or whose backward was compiled under other settings than forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.aot_autograd_result import AOTAutogradResult, CompiledBackward, CompiledForward
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, BypassAOTAutogradCache
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes

from fusion.codegen.target import Target
from fusion.graph_cache import DAMAGED, Finished, eager_graph, finished, not_kept, not_read
from fusion.graph_cache.key import surroundings_of
from fusion.graph_cache.region_key import devices_of, key_of_region
from fusion.graph_cache.serialise import Unwritten, read, write
from fusion.graph_cache.size_guards import holds, parsed
from fusion.graph_cache.store import get, put
from fusion.graph_cache.traced import KINDS, CompiledRegion, JointFacts, Traced, described, result_of
from fusion.inspect.required import NotAsRequired
from fusion.lowering.errors import BuildError
from fusion.options import Options
from fusion.runtime import Boxed

if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph

KEY = "_fx_graph_cache_key"
"""The attribute with which a compiled graph tells AOTAutograd its cache key."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Holds the request of Dynamo to compile a region."""

    graph: fx.GraphModule
    inputs: Sequence[object]
    options: Options


class CachedRegion:
    """A region on its way through AOTAutograd.

    Args:
        asked: released once the key is computed, so that inputs are freed as early as in eager.
        target: returns the target of a device.
        facts: receives the facts derived from the joint graph, at tracing or from the cache.
        load: makes cached compilations callable.
        note: is called with the outcome of the cache, for the report.
        kept: is called with the key of the entry, once there is one.
    """

    def __init__(
        self,
        asked: Asked,
        target: Callable[[torch.device], Target],
        facts: list[JointFacts],
        load: Callable[[Sequence[Finished]], Sequence[Boxed]],
        note: Callable[[str], object],
        kept: Callable[[str], object] = lambda key: None,
    ) -> None:
        self._asked = [asked]
        self._target, self._facts, self._load, self._note = target, facts, load, note
        self._keep = kept
        self._guards = 0
        self._devices: Sequence[torch.device] = ()
        self._surroundings: Sequence[str] = ()

    def key(self, configuration: object) -> Key:
        """Return the cache key of the region.  `configuration`: AOTAutograd's, of this trace.

        Raises:
            BypassAOTAutogradCache: it has no key.
        """
        asked = self._asked.pop()
        try:
            self._devices = devices_of(asked.graph)
            self._surroundings = self._current_surroundings()
            targets = [self._target(device) for device in self._devices]
            return Key(key_of_region(asked.graph, asked.inputs, configuration, asked.options, targets), self)
        except Exception as refusal:  # also an internal error: a program without cache entry still runs
            self._note(not_kept(refusal))
            raise BypassAOTAutogradCache(str(refusal)) from refusal
        finally:
            self._guards = len(_guards())

    def find(self, key: Key, sizes: Sequence[torch.SymInt]) -> object:
        """Return AOTAutograd's result with the compiled graphs, from the cache; None if there is no entry.

        Args:
            sizes: the symbolic ones among the inputs, which get the guards of the entry.
        """
        try:
            text = get(key, "regions")
            kept = None if text is None else read(text, KINDS)
            if not isinstance(kept, Traced):
                return None
            guard = parsed(kept.guards) if kept.guards else None
        except BuildError as refusal:
            self._note(not_read(refusal))
            return None
        except Exception:  # the entry is damaged
            self._note(DAMAGED)
            return None
        try:
            compilations = [each for each in map(finished, kept.graphs) if each is not None]
        except Exception:  # reported by the graph's own `WarmStart`
            return None
        try:
            if len(compilations) < len(kept.graphs) or (
                guard is not None and not holds(guard, [size.node.hint for size in sizes])
            ):
                return None
            result = joined(kept, compilations, self._load)
            if guard is not None:
                holds(guard, sizes)
        except NotAsRequired:
            raise
        except Exception as failure:  # also an internal error: the region is traced again
            self._note(f"not taken from the cache: {type(failure).__name__}: {failure}")
            return None
        self._facts.append(kept.facts)
        context = TracingContext.try_get()
        if context is not None:
            context.fw_metadata = result.runtime_metadata  # Dynamo's context expects it there
        self._keep(key)
        return result

    def keep(self, key: Key, result: AOTAutogradResult) -> None:
        """Store AOTAutograd's result."""
        try:
            if len(_guards()) > self._guards:
                raise Unwritten("its inputs share memory")
            if self._current_surroundings() != self._surroundings:
                raise Unwritten("settings were changed before its backward was compiled")
            with _disable_current_modes():
                traced = described(result, *self._facts[:1])
                if traced.guards:
                    parsed(traced.guards)
                text = write(traced, KINDS)
                if write(read(text, KINDS), KINDS) != text:
                    raise Unwritten("it does not deserialise to what was serialised")
            put(key, text, "regions")
            self._keep(key)
        except Exception as refusal:
            self._note(not_kept(refusal))

    def _current_surroundings(self) -> list[str]:
        """Return the settings on which compilations of this region's graphs depend, as they are now."""
        return [surroundings_of(self._target(device)) for device in self._devices]


def joined(
    traced: Traced, compilations: Sequence[Finished], load: Callable[[Sequence[Finished]], Sequence[Boxed]]
) -> AOTAutogradResult:
    """Return AOTAutograd's result for a region, with its compiled graphs, which `load` makes callable."""
    graphs = load(compilations)
    backward = None if traced.backward is None else _Backward(graphs[1], *traced.backward)
    return result_of(traced, CompiledRegion(_Forward(graphs[0]), backward, partial(eager_graph, compilations[-1])))


def _guards() -> Sequence[object]:
    """Return the guards that AOTAutograd has added."""
    context = TracingContext.try_get()
    return () if context is None else context.guards_context.aotautograd_guards


class Key(str):
    """The cache key of a region, with the region."""

    region: CachedRegion

    def __new__(cls, text: str, region: CachedRegion) -> Key:
        key = super().__new__(cls, text)
        key.region = region
        return key


class _Forward(CompiledForward):
    """A forward or inference graph that is compiled already."""

    def __init__(self, graph: Boxed) -> None:
        super().__init__(("", []), None)
        self.graph = graph

    def load(self, example_inputs: Sequence[object]) -> CompiledFxGraph:
        return cast("CompiledFxGraph", self.graph)

    def post_compile(self, result: CompiledFxGraph, fx_config: object) -> CompiledFxGraph:
        return result


class _Backward(CompiledBackward):
    """Represents a compiled backward graph, which AOTAutograd does not compile again."""

    def __init__(self, graph: Boxed, states: Sequence[int], symbols: int) -> None:
        super().__init__(
            fx_graph_cache_info=("", []),
            fx_graph_guard_expr=None,
            backward_state_indices=list(states),
            num_symints_saved_for_bw_=symbols,
        )
        self.graph = graph

    def load(self, example_inputs: Sequence[object]) -> CompiledFxGraph:
        return cast("CompiledFxGraph", self.graph)

    def post_compile(self, result: CompiledFxGraph, fx_config: object) -> CompiledFxGraph:
        disable: Callable[..., CompiledFxGraph] = torch.compiler.disable
        return disable(result, reason="it is compiled")


# PyTorch's cache ----------------------------------------------------------------------------------------------------

_current: ContextVar[CachedRegion | None] = ContextVar("region", default=None)


@contextmanager
def kept_as(region: CachedRegion | None) -> Iterator[None]:
    """Let AOTAutograd look `region` up before it traces, and store it once forward (or backward) is compiled."""
    if region is None or autograd_cache.should_bundle_autograd_cache() or functorch_config.bypass_autograd_cache_key:
        yield  # bundles for other machines are left to PyTorch
        return
    _listen()
    token = _current.set(region)
    try:
        with functorch_config.patch(force_autograd_cache=True):
            yield
    finally:
        _current.reset(token)


@cache
def _listen() -> None:
    """Route PyTorch's cache through the current region, from now on."""
    own_key: Callable[..., object] = autograd_cache.autograd_cache_key
    own_lookup: Callable[..., object] = AOTAutogradCache._lookup
    own_save: Callable[..., object] = AOTAutogradCache.save

    @wraps(own_key)
    def key(mod: object, inputs: object, asked: object, *others: object, **named: object) -> object:
        region = _current.get()
        return own_key(mod, inputs, asked, *others, **named) if region is None else (region.key(asked), [])

    @wraps(own_lookup)
    def lookup(
        key: object, local: object, remote: object, inputs: Sequence[object], *others: object, **named: object
    ) -> object:
        if not isinstance(key, Key):
            return own_lookup(key, local, remote, inputs, *others, **named)
        sizes = AOTAutogradCache._filter_backed_symints(cast("list[torch.Tensor | int]", inputs))
        result = key.region.find(key, sizes)
        return None if result is None else (result, b"")

    @wraps(own_save)
    def save(key: object, entry: AOTAutogradResult, *others: object, **named: object) -> object:
        if not isinstance(key, Key):
            return own_save(key, entry, *others, **named)
        key.region.keep(key, entry)
        return None

    module, cached = cast("Any", autograd_cache), cast("Any", AOTAutogradCache)
    module.autograd_cache_key = key
    cached._lookup, cached.save = staticmethod(lookup), staticmethod(save)


__all__ = ["KEY", "CachedRegion", "JointFacts", "joined", "kept_as"]
