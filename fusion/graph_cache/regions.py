"""Caches AOTAutograd's results for the regions that Dynamo captured, for later processes.

PyTorch caches AOTAutograd's results itself, for inductor: mutated inputs, results that are views, saved tensors, guards
on sizes.  Input: such a result, once forward (and backward, if any) is compiled and cached (`WarmStart`); output, at
the next start: the result with the compiled graphs.  Nothing is traced, partitioned or lowered then.  Three functions
of PyTorch's cache are replaced, and call the originals for regions of others: PyTorch's own key imports all of
inductor, and takes operations of the program's own for known.  The entry is pickled by PyTorch's classes, and unpickled
only from files of this user, as is the binary beside it that is loaded.

Not cached, with a note in the report, are regions that cannot be serialised in full (`region_key.py`), whose inputs
overlap where one is mutated, or whose backward was compiled under other settings than forward; and those with a result
that is a view which PyTorch does not pickle rightly (`_Pickler`).
"""

from __future__ import annotations

import base64
import copyreg
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, wraps
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, cast

import torch
from torch import fx
from torch._C import _functionalization
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.aot_autograd_result import CompiledBackward, CompiledForward
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, BypassAOTAutogradCache
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes

from fusion.codegen.target import Target
from fusion.graph_cache import DAMAGED, Finished, finished, not_kept, not_read
from fusion.graph_cache.form import Unwritten, read, write
from fusion.graph_cache.key import surroundings_of
from fusion.graph_cache.region_key import devices_of, key_of_region
from fusion.graph_cache.store import get, put
from fusion.joint.dependence import Dependence
from fusion.lowering.errors import BuildError, Origin
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.runtime.rng_replay import Draws

if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph

Told: TypeAlias = "tuple[Dependence | None, Draws | None]"
"""The dependence of gradients on inputs, if known, and the random draws, if any."""

KEY = "_fx_graph_cache_key"
"""The attribute with which a compiled graph tells AOTAutograd its cache key."""


@dataclass(frozen=True, slots=True)
class Traced:
    """The entry of a region.

    Attributes:
        result: AOTAutograd's, pickled, in base64.
        graphs: the keys of forward, and of backward if there is one.
    """

    result: str
    graphs: tuple[str, ...]
    told: Told = (None, None)


KINDS = {kind.__name__: kind for kind in (Traced, Dependence, Draws, Origin)}


@dataclass(frozen=True, slots=True)
class Asked:
    """What Dynamo asks the backend to compile."""

    graph: fx.GraphModule
    inputs: Sequence[object]
    options: Options


class Region:
    """A region on its way through AOTAutograd.

    Args:
        asked: released once the key is computed, so that inputs are freed as early as in eager.
        target: returns the target of a device.
        told: receives what was derived from the joint graph, at tracing or from the cache.
        load: makes cached compilations callable.
        note: is called with the outcome of the cache, for the report.
    """

    def __init__(
        self,
        asked: Asked,
        target: Callable[[torch.device], Target],
        told: list[Told],
        load: Callable[[Sequence[Finished]], Sequence[Boxed]],
        note: Callable[[str], object],
    ) -> None:
        self._asked = [asked]
        self._target, self._told, self._load, self._note = target, told, load, note
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

    def find(self, key: Key, sizes: Sequence[int]) -> Any:
        """Return AOTAutograd's result with the compiled graphs, from the cache; None if there is no entry."""
        try:
            text = get(key, "regions")
            kept = None if text is None else read(text, KINDS)
            if not isinstance(kept, Traced):
                return None
            result = pickle.loads(base64.b64decode(kept.result))
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
            guards = result.guards_expr
            if len(compilations) < len(kept.graphs) or (
                guards and not AOTAutogradCache.evaluate_guards(guards, list(sizes))
            ):
                return None
            graphs = self._load(compilations)
        except Exception as failure:  # also an internal error: the region is traced again
            self._note(f"not taken from the cache: {type(failure).__name__}: {failure}")
            return None
        self._told.append(kept.told)
        result.compiled_fw = _Forward(graphs[0])
        if result.compiled_bw is not None:
            own = result.compiled_bw
            result.compiled_bw = _Backward(graphs[1], own.backward_state_indices, own.num_symints_saved_for_bw_)
        context = TracingContext.try_get()
        if context is not None:
            context.fw_metadata = result.runtime_metadata  # Dynamo's context expects it there
        return result

    def keep(self, key: Key, result: Any) -> None:
        """Store AOTAutograd's result."""
        try:
            if len(_guards()) > self._guards or any(map(_depends_on_overlaps, result.dispatch_wrappers)):
                raise Unwritten("its inputs share memory")
            if self._current_surroundings() != self._surroundings:
                raise Unwritten("settings were changed before its backward was compiled")
            halves = [half for half in (result.compiled_fw, result.compiled_bw) if half is not None]
            keys = tuple(half.fx_graph_cache_info[0] for half in halves)
            with _disable_current_modes():
                pickled = _pickled(_without_text(result))
            text = write(Traced(base64.b64encode(pickled).decode(), keys, *self._told[:1]), KINDS)
            put(key, text, "regions")
        except Exception as refusal:
            self._note(not_kept(refusal))

    def _current_surroundings(self) -> list[str]:
        """Return what compilations of this region's graphs depend on beside the graphs, now."""
        return [surroundings_of(self._target(device)) for device in self._devices]


def _guards() -> Sequence[object]:
    """Return the guards that AOTAutograd has added."""
    context = TracingContext.try_get()
    return () if context is None else context.guards_context.aotautograd_guards


def _depends_on_overlaps(wrapper: object) -> bool:
    """Return whether a wrapper around the compiled graphs depends on how inputs overlap."""
    return bool(getattr(wrapper, "needs_post_compile", False))


def _without_text(result: Any) -> Any:
    """Return a result without the text of its graphs, which is for logs."""
    names = ("aot_joint_graph_str", "aot_forward_graph_str", "aot_backward_graph_str", "min_cut_info_str")
    return replace(result, **{name: None for name in names if hasattr(result, name)})


def _pickled(result: object) -> bytes:
    """Pickle a result.

    Raises:
        Unwritten: one of its results is a view that PyTorch does not pickle rightly.
    """
    file = BytesIO()
    _Pickler(file).dump(result)
    return file.getvalue()


def _refused(view: object) -> NoReturn:
    raise Unwritten(f"one of its results is a view that PyTorch does not write rightly ({type(view).__name__})")


_views: Any = _functionalization  # its stub declares less than it has


class _Pickler(pickle.Pickler):
    """Refuses views that PyTorch would pickle from freed memory.

    A result's chain of views is pickled, too.  Two kinds of views (`FunctionalizeFallbackKernel.h`) hand out their
    sizes as a reference to a copy that is freed by then: arbitrary numbers would be written, or the process crash.
    """

    # Of the class, where typeshed has one of an instance.
    dispatch_table: ClassVar[Mapping[type, Callable[..., object]]] = {  # type: ignore[misc, assignment]  # see above
        **copyreg.dispatch_table,
        _views._unsafe_view_ViewMeta: _refused,
        _views.resize__ViewMeta: _refused,
    }


class Key(str):
    """The cache key of a region, with the region."""

    region: Region

    def __new__(cls, text: str, region: Region) -> Key:
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
    """A backward graph that is compiled already."""

    def __init__(self, graph: Boxed, states: list[int], symbols: int) -> None:
        super().__init__(
            fx_graph_cache_info=("", []),
            fx_graph_guard_expr=None,
            backward_state_indices=states,
            num_symints_saved_for_bw_=symbols,
        )
        self.graph = graph

    def load(self, example_inputs: Sequence[object]) -> CompiledFxGraph:
        return cast("CompiledFxGraph", self.graph)

    def post_compile(self, result: CompiledFxGraph, fx_config: object) -> CompiledFxGraph:
        disable: Callable[..., CompiledFxGraph] = torch.compiler.disable
        return disable(result, reason="it is compiled")


# PyTorch's cache ----------------------------------------------------------------------------------------------------

_current: ContextVar[Region | None] = ContextVar("region", default=None)


@contextmanager
def kept_as(region: Region | None) -> Iterator[None]:
    """Within, AOTAutograd looks `region` up before it traces, and stores it once forward (or backward) is compiled."""
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
        sizes = [
            size.node.hint for size in AOTAutogradCache._filter_backed_symints(cast("list[torch.Tensor | int]", inputs))
        ]
        found = key.region.find(key, sizes)
        return None if found is None else (found, b"")

    @wraps(own_save)
    def save(key: object, entry: object, *others: object, **named: object) -> object:
        if not isinstance(key, Key):
            return own_save(key, entry, *others, **named)
        key.region.keep(key, entry)
        return None

    module, cached = cast("Any", autograd_cache), cast("Any", AOTAutogradCache)
    module.autograd_cache_key = key
    cached._lookup, cached.save = staticmethod(lookup), staticmethod(save)


__all__ = ["KEY", "Region", "Told", "kept_as"]
