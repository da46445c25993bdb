"""Regions: what AOTAutograd made of what Dynamo captured, kept for the next process.

PyTorch keeps the results of AOTAutograd itself, for inductor: how inputs are changed and results are views, what is
saved for backward, guards on sizes.  What enters here is that result, once forward (and backward, if there is one) is
compiled, and each of them kept (`WarmStart`); what leaves at the next start are the compiled graphs, put into it.
Nothing is traced, parted or lowered then.  PyTorch's cache asks and is told through three of its functions, which pass
to it what is not ours: its own key imports all of inductor, and takes operations of the program's own for known.

What lies in the file is pickled by PyTorch's classes, and unpickled where it is this user's own, as is the binary
beside it that is loaded.

Refused, with a note in the report, are regions that cannot be told in full (`region_key.py`), or whose inputs lie over
one another where one is changed, or whose backward was compiled under other settings than forward; and those with a
result that is a view PyTorch does not write rightly (`_Pickler`).
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
from fusion.graph_cache import DAMAGED, Finished, finished, not_kept, store
from fusion.graph_cache.form import Unwritten, read, write
from fusion.graph_cache.key import surroundings_of
from fusion.graph_cache.region_key import devices_of, key_of_region
from fusion.graph_cache.store import get, put
from fusion.joint.dependence import Dependence
from fusion.lowering.errors import Origin
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.runtime.rng_replay import Draws

if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph

Told: TypeAlias = "tuple[Dependence | None, Draws | None]"
"""What gradients depend on, if that is known, and what is drawn at random, if anything is."""

KEY = "_fx_graph_cache_key"
"""The attribute by which AOTAutograd asks a compiled graph what it is kept under."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What is kept of a region.

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
    """What Dynamo asks to have compiled, and how."""

    graph: fx.GraphModule
    inputs: Sequence[object]
    options: Options


class Region:
    """What Dynamo captured, on its way through AOTAutograd.

    Args:
        asked: it is let go of once there is a key, so that inputs die where eager lets them.
        target: the target of a device.
        told: what was found of its joint graph, where it is traced; what was found before is added.
        load: makes graphs run that were compiled before.
        note: is told what became of the region, for the report.
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
        """What is kept of the region, or will be, is found by this; `configuration`: AOTAutograd's, of this trace.

        Raises:
            BypassAOTAutogradCache: it has no key.
        """
        asked = self._asked.pop()
        try:
            self._devices = devices_of(asked.graph)
            self._surroundings = self._found_around()
            targets = [self._target(device) for device in self._devices]
            return Key(key_of_region(asked.graph, asked.inputs, configuration, asked.options, targets), self)
        except Exception as refusal:  # also a defect of ours: to keep nothing leaves the program running
            self._note(not_kept(refusal))
            raise BypassAOTAutogradCache(str(refusal)) from refusal
        finally:
            self._guards = len(_guards())

    def find(self, key: Key, sizes: Sequence[int]) -> Any:
        """AOTAutograd's result with what was compiled, as it is at the next start; None where there is none."""
        try:
            text = get(key, store.regions)
            kept = None if text is None else read(text, KINDS)
            if not isinstance(kept, Traced):
                return None
            result = pickle.loads(base64.b64decode(kept.result))
        except Exception:  # whatever is found there, it is not what was written
            self._note(DAMAGED)
            return None
        try:
            made = [each for each in map(finished, kept.graphs) if each is not None]
        except Exception:  # as their own start says
            return None
        try:
            guards = result.guards_expr
            if len(made) < len(kept.graphs) or (guards and not AOTAutogradCache.evaluate_guards(guards, list(sizes))):
                return None
            graphs = self._load(made)
        except Exception as failure:  # also a defect of ours: it is traced anew
            self._note(f"not taken from the cache: {type(failure).__name__}: {failure}")
            return None
        self._told.append(kept.told)
        result.compiled_fw = _Forward(graphs[0])
        if result.compiled_bw is not None:
            own = result.compiled_bw
            result.compiled_bw = _Backward(graphs[1], own.backward_state_indices, own.num_symints_saved_for_bw_)
        context = TracingContext.try_get()
        if context is not None:
            context.fw_metadata = result.runtime_metadata  # where whoever looks after a region finds it
        return result

    def keep(self, key: Key, result: Any) -> None:
        """Keep what AOTAutograd made."""
        try:
            if len(_guards()) > self._guards or any(map(_looks_at_memory, result.dispatch_wrappers)):
                raise Unwritten("its inputs share memory")
            if self._found_around() != self._surroundings:
                raise Unwritten("settings were changed before its backward was compiled")
            halves = [half for half in (result.compiled_fw, result.compiled_bw) if half is not None]
            keys = tuple(half.fx_graph_cache_info[0] for half in halves)
            with _disable_current_modes():
                pickled = _pickled(_without_text(result))
            text = write(Traced(base64.b64encode(pickled).decode(), keys, *self._told[:1]), KINDS)
            put(key, text, store.regions)
        except Exception as refusal:
            self._note(not_kept(refusal))

    def _found_around(self) -> list[str]:
        """What compilations of this region's graphs read beside them, now."""
        return [surroundings_of(self._target(device)) for device in self._devices]


def _guards() -> Sequence[object]:
    """What AOTAutograd has asked to be compared at each call."""
    context = TracingContext.try_get()
    return () if context is None else context.guards_context.aotautograd_guards


def _looks_at_memory(wrapper: object) -> bool:
    """Does a step around the compiled graphs depend on how inputs lie over one another?"""
    return bool(getattr(wrapper, "needs_post_compile", False))


def _without_text(result: Any) -> Any:
    """A result without the text of its graphs, which is there to be logged."""
    names = ("aot_joint_graph_str", "aot_forward_graph_str", "aot_backward_graph_str", "min_cut_info_str")
    return replace(result, **{name: None for name in names if hasattr(result, name)})


def _pickled(result: object) -> bytes:
    """A result as bytes.

    Raises:
        Unwritten: one of its results is a view that PyTorch does not write rightly.
    """
    file = BytesIO()
    _Pickler(file).dump(result)
    return file.getvalue()


def _refused(view: object) -> NoReturn:
    raise Unwritten(f"one of its results is a view that PyTorch does not write rightly ({type(view).__name__})")


_views: Any = _functionalization  # declares less than it has


class _Pickler(pickle.Pickler):
    """Refuses what PyTorch would write out of memory that it has freed.

    It keeps by which views a result is made of its base.  Two of these (`FunctionalizeFallbackKernel.h`) hand out their
    sizes as a reference to a copy that is gone by then: what is written is any number, or the process ends.
    """

    # Of the class, where typeshed has one of an instance.
    dispatch_table: ClassVar[Mapping[type, Callable[..., object]]] = {  # type: ignore[misc, assignment]  # see above
        **copyreg.dispatch_table,
        _views._unsafe_view_ViewMeta: _refused,
        _views.resize__ViewMeta: _refused,
    }


class Key(str):
    """What is kept of a region is found by this; knows the region, too."""

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
    """Within, AOTAutograd asks `region` before it traces, and tells it what it has made, then or once backward ran."""
    if region is None or autograd_cache.should_bundle_autograd_cache() or functorch_config.bypass_autograd_cache_key:
        yield  # what is bundled for another machine is PyTorch's own affair
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
    """Have PyTorch's cache ask the current region, from here on."""
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
