"""Derives the functional ATen graphs of a region: forward and backward, or one graph for inference.

Dynamo captures Python as fx graphs; AOTAutograd turns these into functional ATen graphs, and min-cut partitioning
chooses the values saved for backward.  `aot_backend` takes a function that compiles one ATen graph, and returns a
Dynamo backend.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import inductor_prims
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion.codegen.target import Capabilities
from fusion.compilation.graphs import main_device
from fusion.dynamo.shared_writes import MemoryRange
from fusion.graph_cache.regions import KEY, CachedRegion, JointFacts, kept_as
from fusion.joint.dependence import dependence_of
from fusion.joint.results import change_results
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.aten.mistraced import traced_as_eager
from fusion.options import WORKSPACE
from fusion.runner.contexts import Deriving, ForwardBackward, Joint
from fusion.runner.passes import PassLog, run_stage
from fusion.runtime import Boxed
from fusion.runtime.rng_replay import draws_of
from fusion.schedule.overrides import PRICED, Overrides
from fusion.stages import JOINT, PARTITIONED

Partitioned: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]
"""A joint graph, partitioned into forward and backward."""

CompileOne: TypeAlias = Callable[[fx.GraphModule, str], Boxed]
"""Compiles one ATen graph; the label is "forward", "backward" or "inference".  A cached result has its cache key in the
attribute `KEY`."""

LogOf: TypeAlias = Callable[[str, fx.GraphModule], PassLog]
"""Returns the log of the passes over a graph with this label."""

Settings: TypeAlias = Mapping[str, object]
"""Keyword arguments of a function of PyTorch."""


def no_log(label: str, graph: fx.GraphModule) -> PassLog:
    """Return a log that is discarded."""
    return PassLog()


def multiply_add(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """Compute a·b + c, rounded once."""
    return torch.addcmul(c, a, b) if isinstance(b, torch.Tensor) else torch.add(c, a, alpha=b)


MULTIPLY_ADD = {inductor_prims.fma: multiply_add} if hasattr(inductor_prims, "fma") else {}
"""Decompositions of the operations that Dynamo captures for `addcmul_` and `addcdiv_` in some releases."""


@dataclass(frozen=True, slots=True)
class Held:
    """An object that a graph holds."""

    value: object


Passed: TypeAlias = "int | Held"
"""A result of a graph that is passed on: the position of an input, or an object."""


def aot_backend(
    compile_one: CompileOne,
    able: Callable[[torch.device], Capabilities],
    workspace: int = WORKSPACE,
    *,
    exact: bool = False,
    on_facts: Callable[[JointFacts], None] = lambda facts: None,
    region: CachedRegion | None = None,
    log: LogOf = no_log,
    overrides: Overrides = PRICED,
) -> Callable[[fx.GraphModule, Sequence[object]], Callable[..., object]]:
    """Return a Dynamo backend that compiles every functional ATen graph with `compile_one`.

    Args:
        able: returns the capabilities and costs of a device.
        workspace: bytes above which a product is computed in chunks, if possible.
        exact: compute as eager does; joint graphs are only partitioned.
        on_facts: called for each joint graph with the dependence of gradients and the random draws.
        region: the cache entry of the captured graph, if it is to be cached.
        log: returns the log of the passes over the joint graph.
        overrides: decisions that are imposed instead of priced.
    """

    def part(
        joint: fx.GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **others: object
    ) -> Partitioned:
        on_facts((dependence_of(joint, num_fwd_outputs), draws_of(joint)))
        at = Deriving(able(main_device(joint)), workspace, exact, overrides)
        return _partitioned(Joint(joint, num_fwd_outputs), joint_inputs, at, log("joint", joint), others)

    settings: Settings = {
        "fw_compiler": _compiler(compile_one, "forward"),
        "bw_compiler": _compiler(compile_one, "backward"),
        "inference_compiler": _compiler(compile_one, "inference"),
        "keep_inference_input_mutations": True,
        "decompositions": MULTIPLY_ADD | decompositions(exact=exact, library=overrides.library),
        "partition_fn": part,
    }

    def capture(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        with traced_as_eager(), tangents_laid_out(graph), kept_as(region):
            compiled = _captured(graph, inputs, settings)
        _keep_what_is_saved()
        return compiled

    return capture


def _captured(graph: fx.GraphModule, inputs: Sequence[object], settings: Settings) -> Callable[..., object]:
    """Call AOTAutograd as Dynamo's wrapper does, without the import of inductor's debugging and scheduler.

    Dynamo is disabled for the compilation and the run of backward, as it is for the callable that it gets.
    """
    if os.environ.get("TORCH_COMPILE_DEBUG") == "1" or any(isinstance(value, (list, tuple, dict)) for value in inputs):
        whole: Callable[..., object] = aot_autograd(**settings)(graph, inputs)
        return whole
    disable: Callable[..., Callable[..., object]] = torch.compiler.disable
    backward = cast("Callable[..., object]", settings["bw_compiler"])

    def compile_backward(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        compiled = backward(graph, inputs)
        disabled: Callable[..., object] = disable(compiled, reason="it is compiled")
        if hasattr(compiled, KEY):
            setattr(disabled, KEY, getattr(compiled, KEY))
        return disabled

    trace: Callable[..., Callable[..., object]] = aot_module_simplified
    compiled = trace(graph, inputs, **{**settings, "bw_compiler": disable(compile_backward, reason="it compiles")})
    # PyTorch's splitting of DDP models knows by these that AOTAutograd compiled a part, and will compile its backward.
    counters["aot_autograd"]["total"] += 1
    counters["aot_autograd"]["ok"] += 1
    return compiled


def _keep_what_is_saved() -> None:
    """Allow a second backward.

    AOTAutograd refuses `retain_graph=True`, unless it was requested when backward was compiled: backends may reuse the
    memory of saved tensors.  This one does not.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _partitioned(joint: Joint, inputs: Sequence[object], at: Deriving, log: PassLog, settings: Settings) -> Partitioned:
    """Partition a joint graph: its passes, PyTorch's min-cut with its `settings`, the passes over both halves."""
    partition: Callable[..., Partitioned] = min_cut_rematerialization_partition
    joint = run_stage(JOINT, joint, at, log)
    with functorch_config.patch(cse=False), log.timed("joint", "partition"):
        cut = partition(joint.graph, inputs, num_fwd_outputs=joint.returned, **settings)
    halves = run_stage(PARTITIONED, ForwardBackward(*cut, joint.results, joint.returned), at, log)
    return halves.forward, halves.backward


def _compiler(compile_one: CompileOne, label: str) -> Callable[[fx.GraphModule, Sequence[object]], Boxed]:
    """Adapt `compile_one` to AOTAutograd's calling convention, for graphs with this label."""

    def compiler(graph: fx.GraphModule, example_inputs: Sequence[object]) -> Boxed:
        passed = pass_objects(graph)
        # The compiler's own computations are on real tensors, without AOTAutograd's dispatch modes.
        with traced_as_eager(), unset_fake_temporarily(), no_python_dispatcher():
            compiled = compile_one(graph, label)
        if passed:
            compiled = _passing(compiled, passed)
        return boxed(compiled)

    return compiler


def boxed(compiled: Boxed) -> Boxed:
    """Return `compiled`, marked for AOTAutograd as taking its inputs as a list."""
    compiled._boxed_call = True  # type: ignore[attr-defined]  # functions take attributes
    return compiled


def pass_objects(graph: fx.GraphModule) -> dict[int, Passed]:
    """Make the graph return None for results that are no tensors or numbers (the device mesh of a distributed tensor).

    Returns:
        The position of the result → the position of the input that it is, or the object that the graph holds.
    """
    places = {node: k for k, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    results = list(cast("Sequence[fx.Node | None]", graph.graph.output_node().args[0]))
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    passed: dict[int, Passed] = {}
    for k, node in enumerate(results):
        if isinstance(node, fx.Node) and node in places and not isinstance(node.meta.get("val"), known):
            passed[k] = places[node]
        elif isinstance(node, fx.Node) and node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(graph)
            if isinstance(held, FakeScriptObject):
                passed[k] = Held(held.real_obj)
    if passed:
        change_results(graph, lambda results: [None if k in passed else node for k, node in enumerate(results)])
        for node in {node for k in passed if (node := results[k]) is not None and node.op == "get_attr"}:
            if not node.users:
                graph.graph.erase_node(node)
        graph.recompile()
    return passed


def _passing(compiled: Boxed, passed: Mapping[int, Passed]) -> Boxed:
    def run(args: list[object]) -> tuple[object, ...]:
        objects = {k: each.value if isinstance(each, Held) else args[each] for k, each in passed.items()}
        results = compiled(args)
        return tuple(objects.get(k, result) for k, result in enumerate(results))

    return run


@contextmanager
def tangents_laid_out(graph: fx.GraphModule) -> Iterator[None]:
    """Let AOTAutograd trace `graph` with gradients whose memory holds all their elements.

    AOTAutograd of PyTorch 2.13 assumes that the gradient of a result has the strides of the result, and copies others
    into memory with those strides (2.11 assumes contiguous gradients).  If elements of the result share memory
    (overlapping windows of `unfold`), that memory holds fewer elements than the gradient, and most are lost.  The
    gradients of such graphs are contiguous.
    """
    values = (node.meta.get("example_value") for node in graph.graph.output_node().all_input_nodes)
    places = [MemoryRange.of(value) for value in values if isinstance(value, torch.Tensor)]
    if any(place is not None and place.overlaps_itself for place in places):
        with functorch_config.patch(guess_tangent_strides_as_outputs=False):
            yield
    else:
        yield
