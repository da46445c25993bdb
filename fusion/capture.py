"""Capture: functional ATen graphs of what a program computes.

Dynamo turns Python into fx graphs and AOTAutograd turns those into functional ATen graphs, forward and backward apart,
with the values saved between them chosen by min-cut.  What enters `aot_backend` is a function that compiles one ATen
graph; what leaves is a Dynamo backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import inductor_prims
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion.captured.tangents import tangents_laid_out
from fusion.graphs import main_device
from fusion.joint import prepare
from fusion.joint.dependence import dependence_of
from fusion.joint.formats import prefer_channels_last
from fusion.joint.layout import lay_out_gradients
from fusion.joint.pairs import part_complex_numbers
from fusion.joint.repeated import merge_repeated
from fusion.joint.rows import prefer_rows
from fusion.joint.saved import keep_unchanged, mark_spare, widen_statistics
from fusion.joint.seeds import cover_undrawn, share_seeds, uncover
from fusion.lowering.decompositions import decompositions
from fusion.options import WORKSPACE
from fusion.runtime import Boxed
from fusion.runtime.draws import draws_of
from fusion.warm.regions import KEY, Region, Told, kept_as

Parted: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]
"""A joint graph as forward and backward."""

CompileOne: TypeAlias = Callable[[fx.GraphModule, str], Boxed]
"""Compiles one ATen graph; the label says which ("forward", "backward", "inference").  What is kept says under which
key, in the attribute `KEY`."""


def multiply_add(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """a·b + c, rounded once."""
    return torch.addcmul(c, a, b) if isinstance(b, torch.Tensor) else torch.add(c, a, alpha=b)


MULTIPLY_ADD = {inductor_prims.fma: multiply_add} if hasattr(inductor_prims, "fma") else {}
"""What Dynamo makes of `addcmul_` and `addcdiv_`, in some releases."""


def aot_backend(
    compile_one: CompileOne,
    streams: Callable[[torch.device], bool],
    workspace: int = WORKSPACE,
    *,
    exact: bool = False,
    tell: Callable[[Told], None] = lambda told: None,
    region: Region | None = None,
) -> Callable[[fx.GraphModule, Sequence[object]], Callable[..., object]]:
    """A Dynamo backend that gives every functional ATen graph to `compile_one`.

    Args:
        streams: can contractions be part of generated kernels on a device?
        workspace: bytes above which a product is made in chunks, where that can be done.
        exact: what is computed stays as eager computes it; forward and backward are only parted.
        tell: told of each joint graph what gradients depend on, and what is drawn.
        region: what is kept of the graph that Dynamo captured, if anything is to be.
    """
    parting = _parted_exactly if exact else partial(_parted, streams=streams, workspace=workspace)
    settings: dict[str, Any] = {
        "fw_compiler": _compiler(compile_one, "forward"),
        "bw_compiler": _compiler(compile_one, "backward"),
        "inference_compiler": _compiler(compile_one, "inference"),
        "keep_inference_input_mutations": True,
        "decompositions": MULTIPLY_ADD | decompositions(exact=exact),
        "partition_fn": partial(parting, tell=tell),
    }

    def capture(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        with tangents_laid_out(graph), kept_as(region):
            compiled = _captured(graph, inputs, settings)
        _keep_what_is_saved()
        return compiled

    return capture


def _captured(graph: fx.GraphModule, inputs: Sequence[object], settings: dict[str, Any]) -> Callable[..., object]:
    """What Dynamo's wrapper of AOTAutograd gives, which imports inductor's debugging, and with it its scheduler.

    Dynamo is kept from looking into backward, where it is compiled and where it runs, and into what is compiled.
    """
    if os.environ.get("TORCH_COMPILE_DEBUG") == "1" or any(isinstance(given, (list, tuple, dict)) for given in inputs):
        whole: Callable[..., object] = aot_autograd(**settings)(graph, inputs)
        return whole
    disable: Any = torch.compiler.disable
    backward = disable(settings["bw_compiler"], reason="it compiles backward")

    def compile_backward(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        compiled = backward(graph, inputs)
        made: Callable[..., object] = disable(compiled, reason="it is compiled")
        if hasattr(compiled, KEY):
            setattr(made, KEY, getattr(compiled, KEY))
        return made

    compiled = aot_module_simplified(graph, inputs, **{**settings, "bw_compiler": compile_backward})
    forward: Callable[..., object] = disable(compiled, reason="it is compiled")
    return forward


def _keep_what_is_saved() -> None:
    """Allow a second backward.

    AOTAutograd refuses `retain_graph=True`, unless it was asked for when backward was compiled: backends may compute in
    the memory of what forward saved.  Ours does not.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _parted(
    joint: fx.GraphModule,
    inputs: Sequence[object],
    *,
    num_fwd_outputs: int,
    streams: Callable[[torch.device], bool],
    workspace: int,
    tell: Callable[[Told], None],
    **others: Any,
) -> Parted:
    """Forward and backward, once `joint` is prepared: what may be computed otherwise than eager does is."""
    tell((dependence_of(joint, num_fwd_outputs), draws_of(joint)))
    lay_out_gradients(joint, num_fwd_outputs)
    part_complex_numbers(joint)
    prefer_channels_last(joint)
    prefer_rows(joint)
    share_seeds(joint)
    kept = prepare(joint, streams=streams(main_device(joint)), workspace=workspace)
    returned = num_fwd_outputs + add_results(joint, kept, num_fwd_outputs)
    parted = _cut(joint, inputs, num_fwd_outputs=returned, **others)
    drop_results(parted[0], num_fwd_outputs, returned)
    widen_statistics(*parted, num_fwd_outputs)
    keep_unchanged(parted[0], num_fwd_outputs)
    mark_spare(*parted, num_fwd_outputs)
    return parted


def _parted_exactly(
    joint: fx.GraphModule,
    inputs: Sequence[object],
    *,
    num_fwd_outputs: int,
    tell: Callable[[Told], None],
    **others: Any,
) -> Parted:
    """Forward and backward of what eager computes."""
    tell((dependence_of(joint, num_fwd_outputs), draws_of(joint)))
    share_seeds(joint)
    parted = _cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
    keep_unchanged(parted[0], num_fwd_outputs)
    return parted


def _cut(joint: fx.GraphModule, inputs: Sequence[object], **others: Any) -> Parted:
    """Forward and backward, with as little as can be between them."""
    merge_repeated(joint)
    cover_undrawn(joint)
    with functorch_config.patch(cse=False):
        parted: Parted = min_cut_rematerialization_partition(joint, inputs, **others)
    for graph in parted:
        uncover(graph)
    return parted


def _compiler(compile_one: CompileOne, label: str) -> Callable[[fx.GraphModule, Sequence[object]], Boxed]:
    """`compile_one` as AOTAutograd calls it, for graphs that it labels so."""

    def compiler(graph: fx.GraphModule, example_inputs: Sequence[object]) -> Boxed:
        passed = pass_objects(graph)
        # What the compiler computes while it compiles is real, and nothing of it is to be taken apart in Python.
        with unset_fake_temporarily(), no_python_dispatcher():
            compiled = compile_one(graph, label)
        if passed:
            compiled = _passing(compiled, passed)
        return boxed(compiled)

    return compiler


def boxed(compiled: Boxed) -> Boxed:
    """`compiled`, with AOTAutograd's mark of the list convention."""
    compiled._boxed_call = True  # type: ignore[attr-defined]
    return compiled


def add_results(joint: fx.GraphModule, kept: Sequence[fx.Node], position: int) -> int:
    """Have the graph return `kept`, too, before its result at `position`; returns how many they are.

    A partition computes in forward what forward returns, whatever it would make of it otherwise.
    """
    if kept:
        _results(joint, lambda results: [*results[:position], *kept, *results[position:]])
        _described(joint, lambda found: [*found[:position], *(found[0] for _ in kept), *found[position:]])
        joint.recompile()
    return len(kept)


def drop_results(graph: fx.GraphModule, start: int, stop: int) -> None:
    """Have the graph not return its results from `start` to `stop`; what backward needs of them comes after these."""
    if start < stop:
        _results(graph, lambda results: [*results[:start], *results[stop:]])
        _described(graph, lambda found: [*found[:start], *found[stop:]])
        graph.recompile()


def _results(graph: fx.GraphModule, change: Callable[[list[fx.Node | None]], list[fx.Node | None]]) -> None:
    output = graph.graph.output_node()
    output.args = (tuple(change(list(cast("Sequence[fx.Node | None]", output.args[0])))),)


def _described(graph: fx.GraphModule, change: Callable[[list[object]], list[object]]) -> None:
    """AOTAutograd says of each result what it is, where it does."""
    output = graph.graph.output_node()
    if "desc" in output.meta:
        output.meta["desc"] = change(list(output.meta["desc"]))


def pass_objects(graph: fx.GraphModule) -> dict[int, int]:
    """Have the graph return None where it returns what it was given and is no tensor or number (a device mesh).

    Returns:
        The position among the inputs of what belongs at a position among the results.
    """
    places = {node: k for k, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    results = list(cast("Sequence[fx.Node | None]", graph.graph.output_node().args[0]))
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    passed = {
        k: places[node]
        for k, node in enumerate(results)
        if isinstance(node, fx.Node) and node in places and not isinstance(node.meta.get("val"), known)
    }
    if passed:
        _results(graph, lambda found: [None if k in passed else node for k, node in enumerate(found)])
        graph.recompile()
    return passed


def _passing(compiled: Boxed, passed: Mapping[int, int]) -> Boxed:
    def run(args: list[object]) -> tuple[object, ...]:
        objects = {k: args[position] for k, position in passed.items()}
        results = compiled(args)
        return tuple(objects.get(k, result) for k, result in enumerate(results))

    return run
