"""Serves `torch.compile(…, backend="fusion", fullgraph=True).aot_compile(…)`: saves regions, and loads them elsewhere.

Dynamo serialises its guards and bytecode, and asks the backend for a callable that serialises itself.  Input: a region;
output: the compiled region, with its entries of the caches as data: AOTAutograd's result, the graphs, the kernels'
objects, and the guards of its calls.  The process that loads it captures, traces and schedules nothing, and builds only
kernels whose objects are for another machine.

A loaded region has no program to fall back to: a call that it was not compiled for raises.  A region that the cache
does not keep is compiled, but not saved.  Dynamo pickles its own part, so a file is as trusted as code (SECURITY.md);
the data of this compiler are read like the cache's.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import NoReturn, TypeAlias, cast

import torch
from torch import fx
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion.attention import Chooser
from fusion.calls.reports import Reports
from fusion.codegen.build import is_idle
from fusion.codegen.cache import observed
from fusion.codegen.targets import builder_for
from fusion.compilation.graph_compiler import GraphCompiler
from fusion.compilation.region import Noted, RegionCompiler
from fusion.graph_cache import KINDS as OF_GRAPHS
from fusion.graph_cache import Finished, keeps_graphs, traced
from fusion.graph_cache.carried import carried, store
from fusion.graph_cache.key import compiler_version
from fusion.graph_cache.regions import joined
from fusion.graph_cache.serialise import read, write
from fusion.graph_cache.store import get
from fusion.joint.dependence import Dependence
from fusion.lowering.errors import BuildError, FusionError, Origin, Unsupported
from fusion.options import Options
from fusion.runtime.autograd_node import AutogradNode
from fusion.runtime.disjoint import Disjoint
from fusion.runtime.guards import Guards
from fusion.runtime.overlaps import InputOverlaps, Overlaps
from fusion.runtime.rng_replay import Draws
from fusion.runtime.second_derivatives import Derivatives
from fusion.runtime.wide_integers import Integers

Run: TypeAlias = Callable[..., object]

OPTIONS = ("mode", "target", "strict", "workspace", "numerics", "close_calls")
"""The options that a loaded region keeps."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A region as data.

    Attributes:
        compiler: the version of this compiler, by a hash of its sources.
        options: names and values.
        region: the entry of the region, as text.
        graphs: the entries of its graphs.
        gradients: whether gradients were enabled when it was compiled.
        autocasts: the devices for which autocast was enabled then, with the dtype.
        objects: entries of kernels, by their names in the cache.
    """

    compiler: str
    options: dict[str, object]
    region: str
    graphs: tuple[str, ...]
    guards: Guards
    gradients: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    objects: Mapping[str, str]


KINDS = {
    kind.__name__: kind
    for kind in (
        *(Saved, Guards, Derivatives, AutogradNode, Draws, Dependence, Origin),
        *(Overlaps, InputOverlaps, Disjoint, Integers),
    )
}
"""The dataclasses that a saved region consists of."""


class Precompiled(SerializableCallable):
    """A compiled region.

    Attributes:
        regions: its compiler, which has the options and the reports.
    """

    def __init__(self, run: Run, regions: RegionCompiler, saved: Saved | str) -> None:
        """Hold a compiled region; `saved` has its data, or the reason why it cannot be saved."""
        self._run, self.regions, self._saved = run, regions, saved

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the region."""
        return self._run(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Precompiled) -> bytes:
        """Serialise a region.

        Raises:
            FusionError: the cache does not keep it; the message says why.
        """
        if isinstance(fn._saved, str):
            raise FusionError(f"this program runs, but cannot be saved: {fn._saved}")
        return zlib.compress(write(replace(fn._saved, objects=_objects(fn._saved)), KINDS).encode(), 1)

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Precompiled:
        """Make a region from the data of `serialize_compile_artifacts`.

        Raises:
            FusionError: it was saved by another version of this compiler, or the data are damaged.
        """
        try:
            saved = read(zlib.decompress(data).decode(), KINDS)
            if not isinstance(saved, Saved):
                raise TypeError(f"a {type(saved).__name__} in place of a region")
        except Exception as damage:  # whatever damaged data make the decoders raise
            raise FusionError(f"the saved region cannot be read: {type(damage).__name__}: {damage}") from damage
        if saved.compiler != compiler_version():
            raise FusionError("the region was saved by another version of Fusion", hint="compile and save it again")
        regions = _regions(saved)
        return cls(_loaded(saved, regions.graphs), regions, saved)


def is_asked_for() -> bool:
    """Return whether Dynamo compiles a region to be saved."""
    return bool(functorch_config.bundled_autograd_cache and functorch_config.bypass_autograd_cache_key)


def precompile(
    regions: RegionCompiler, graph: fx.GraphModule, inputs: Sequence[object], part_backend: Run
) -> Precompiled:
    """Compile a region that is to be saved, forward and backward."""
    noted, before = Noted(), len(regions.graphs.reports.all)
    # PyTorch's own bundles hold results of inductor, so a region is compiled as any other.
    own = {"bundled_autograd_cache": False, "bypass_autograd_cache_key": False, "strict_autograd_cache": False}
    with functorch_config.patch(own):
        run = regions.compile(graph, inputs, part_backend, noted=noted)
    if noted.guards is None or not noted.key:
        return Precompiled(run, regions, _reason(regions, before))
    region = get(noted.key, "regions")
    keys = cast("traced.Traced", read(region or "", traced.KINDS)).graphs
    graphs = tuple(text for key in keys if (text := get(key)) is not None)
    if region is None or len(graphs) < len(keys):
        return Precompiled(run, regions, "its entries were removed from the cache")
    options = {name: getattr(regions.options, name) for name in OPTIONS}
    at = torch.is_grad_enabled(), _autocasts()
    return Precompiled(run, regions, Saved(compiler_version(), options, region, graphs, noted.guards, *at, {}))


def _reason(regions: RegionCompiler, before: int) -> str:
    """Return why the last compiled region cannot be saved; `before`: the number of reports before it."""
    options = regions.options
    if not keeps_graphs(options):
        return "it is not kept in the graph cache, which an option, a dump, edited kernels or max-autotune rule out"
    if options.cudagraphs:
        return "its launches are recorded as a CUDA graph"
    reports = regions.graphs.reports.all[before:]
    notes = [note for report in reports for note in report.notes if note.startswith("not kept in the cache: ")]
    return notes[0].partition(": ")[2] if notes else "a part of it runs eagerly"


def _autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    devices = torch._C._autocast_supported_devices()
    return tuple((name, torch.get_autocast_dtype(name)) for name in devices if torch.is_autocast_enabled(name))


# Objects ------------------------------------------------------------------------------------------------------------


def _objects(saved: Saved) -> dict[str, str]:
    """Return the entries of the kernels of a region, which are in the cache, or built again."""
    entries: dict[str, str] = {}

    def see(folder: str, name: str, content: bytes) -> None:
        if carried(folder, name):
            entries[f"{folder}/{name}"] = base64.b64encode(content).decode()

    options = _options(saved)
    with observed(see):
        for compilation in _compilations(saved):
            target = builder_for(compilation.interface.device.type, options.target, options.current_numerics).target
            for kernel, source in compilation.sources.items():
                if not is_idle(kernel):
                    target.build(kernel, source)
    return entries


def _store(objects: Mapping[str, str]) -> None:
    """Store the objects in this user's caches, if that is possible: otherwise kernels are built."""
    for key, content in objects.items():
        folder, _, name = key.partition("/")
        with suppress(BuildError, OSError):
            store(folder, name, base64.b64decode(content))


# Loading ------------------------------------------------------------------------------------------------------------


class _Unknown:
    """The program of a loaded region, which is not in its file."""

    def __call__(self, *args: object) -> NoReturn:
        self.say(Unsupported("the program is needed"))

    def say(self, reason: Unsupported) -> NoReturn:
        """Refuse to run it.

        Raises:
            FusionError: always.
        """
        message = f"a region that was loaded cannot run this call: {reason.message}"
        raise FusionError(message, hint=reason.hint or "compile the program in this process")

    def instead(self, message: str, hint: str = "") -> Run:
        """Return a function that raises."""
        refusal = Unsupported(message, hint=hint)

        def run(*args: object) -> NoReturn:
            self.say(refusal)

        return run


def _options(saved: Saved) -> Options:
    known = {each.name for each in fields(Options)}
    return replace(Options.read(), **{name: value for name, value in saved.options.items() if name in known})  # type: ignore[arg-type]  # saved values of the same fields


def _compilations(saved: Saved) -> list[Finished]:
    return [cast("Finished", read(text, OF_GRAPHS)) for text in saved.graphs]


def _regions(saved: Saved) -> RegionCompiler:
    graphs = GraphCompiler(_options(saved), Reports())
    return RegionCompiler(graphs, Chooser(graphs.target, strict=False, generated=None))


def _loaded(saved: Saved, graphs: GraphCompiler) -> Run:
    """Return the callable of a region."""
    _store(saved.objects)
    region = cast("traced.Traced", read(saved.region, traced.KINDS))
    with _as_compiled(saved):
        result = joined(region, _compilations(saved), graphs.load)
        asked = AOTConfig(None, None, None, None, 0, 0, keep_inference_input_mutations=True, enable_log=False)
        boxed: Run = result.wrap_post_compile([], asked, {})

        def run(*args: object) -> object:
            return boxed(list(args))

        disable: Callable[..., Run] = torch.compiler.disable
        return saved.guards.around(disable(run, reason="it is compiled"), _Unknown())


@contextmanager
def _as_compiled(saved: Saved) -> Iterator[None]:
    """Set the modes of autograd and autocast under which a region was compiled, and a tracing context."""
    with ExitStack() as modes:
        modes.enter_context(torch.set_grad_enabled(saved.gradients))
        for device, dtype in saved.autocasts:
            modes.enter_context(torch.autocast(device, dtype))
        modes.enter_context(tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))))
        yield


__all__ = ["Precompiled", "is_asked_for", "precompile"]
