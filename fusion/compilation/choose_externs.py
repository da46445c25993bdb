"""Chooses which operations of a graph are lowered, and which stay library calls.

Input: a captured graph and the target's capabilities and costs; output: a Program.  Library calls remain for products
that the library computes faster and that have no prologue or epilogue to fuse, and for updates of memory in a fixed
order, if the target has none.  Under strict numerics all products and updates remain library calls; if numerics are
batch-invariant, all products are generated, since the library's kernel depends on the number of rows.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fusion.codegen.target import EVERY, Capabilities
from fusion.compilation.graphs import main_device
from fusion.dumps.trace import Trace
from fusion.lowering.ir.program import Contract, Program
from fusion.lowering.lower import lower
from fusion.runner.contexts import Scheduled, Scheduling
from fusion.runner.passes import run_stage
from fusion.schedule.library.choice import is_priced_alone
from fusion.schedule.rewrites.vector_products import of_few_rows
from fusion.stages import PREVIEW_LOOPS, PREVIEW_MAPS

FLOAT_BYTES = (2, 4, 8)
"""Sizes of the floats that products multiply, in bytes."""

LEAST_GAIN = 0.25
"""The share of the time of a small sum that a call is taken to gain at least, whatever the rates of the device: sums of
more multiplications are not as fast as small ones, because their operands are not blocked."""


def lower_for(graph: fx.GraphModule, at: Scheduling, trace: Trace) -> Program:
    """Lower `graph` for the target of `at`; the passes that find the fusions of its products are logged in `trace`.

    Raises:
        Unsupported: the graph cannot be represented as a Program.
    """
    target, capabilities, place = at.machine, at.capabilities, main_device(graph)
    if target.numerics.invariant:
        scans = capabilities.scans
        generated = lower(graph, device=place, scatters=frozenset(), rounded=True, scans=scans, invariant=True)
        return generated.edited(library=dict.fromkeys(generated.library, ()))
    if target.numerics.strict:
        return lower(graph, device=place, contractions=(), scatters=frozenset(), rounded=True)
    contractions = _products(graph, at, trace) if at.overrides.leaves_products else None
    scatters, small = _scatters(capabilities), _small(capabilities)
    return lower(graph, device=place, contractions=contractions, scatters=scatters, small=small)


def _small(capabilities: Capabilities) -> dict[int, int]:
    """Return bytes of an operand's element → the multiplications that the scalar units do in the launch time of a call.

    That is the time by which they are behind GEMMs of that type, or of widened operands, whichever are faster.
    """
    rates = capabilities.rates
    small: dict[int, int] = {}
    for itemsize in FLOAT_BYTES:
        summed = max(1, itemsize // 4) / (rates.summed * rates.flops)
        multiplied = min(capabilities.product_us(1, size) for size in {itemsize, max(itemsize, 4)})
        small[itemsize] = int(rates.launch_us / max(summed - multiplied, LEAST_GAIN * summed) / 2)
    return small


def _products(graph: fx.GraphModule, at: Scheduling, trace: Trace) -> Collection[str] | None:
    """Return the names of matrix products to lower as contractions; None for all.

    Of types for which the library's GEMMs are faster than generated ones, only those that are chained in one loop,
    chunked, or with few rows.
    """
    capabilities = at.capabilities
    if capabilities.lone_products.keys() >= EVERY.keys() and "dot" in capabilities.fold_ops:
        return None
    lowered = lower(graph, device=main_device(graph), scatters=_scatters(capabilities))
    if not any(isinstance(node, Contract) for node in lowered.nodes):
        return ()
    preview = trace.within("preview")
    preview.program(1, "program", lowered)
    maps = run_stage(PREVIEW_MAPS, Scheduled(lowered), at, preview.log)
    loops = run_stage(PREVIEW_LOOPS, maps, at, preview.log)
    whole, program = maps.program, loops.program
    outside = {node.out for node in program.nodes if isinstance(node, Contract)}
    products = [node for node in whole.nodes if isinstance(node, Contract) and node.out not in outside]
    nodes = (program.nodes[member] for cluster in loops.chains for member in cluster.members)
    products += [node for node in nodes if isinstance(node, Contract)]
    if "dot" in capabilities.fold_ops:
        products += [node for node in whole.nodes if isinstance(node, Contract) and is_priced_alone(node, capabilities)]
    few = of_few_rows(whole, capabilities)
    products += [node for node in whole.nodes if isinstance(node, Contract) and node.out in few]
    origins = {**whole.origins, **program.origins}  # chains have other names for their tiles
    return {origins[node.out].name for node in products}


def _scatters(capabilities: Capabilities) -> frozenset[str]:
    """Return the allowed combines of colliding writes; only order-independent ones if the caller wants determinism."""
    if capabilities.ordered or not torch.are_deterministic_algorithms_enabled():
        return capabilities.scatters
    return capabilities.scatters & {"max", "min"}
