"""Lists the whole path: every pass of every stage, in order.

    Dynamo's graph ── CAPTURED ── PREPARED ── AOTAutograd ─┬─ JOINT ── partition ── PARTITIONED ── forward, backward
                                                           └─ INFERENCE ── one graph

    each ATen graph ── lower ── PROGRAM ── CLUSTERS ── LAUNCHES ── generate ── build ── splice ── run
                       └─ preview, where the library's GEMMs are faster: lower ── PREVIEW_MAPS ── PREVIEW_LOOPS

This module has the order and the conditions of passes; `runner/` runs, checks, times and dumps them, and hands them
their arguments.  The stages are started in `compilation/`: by `region.py` (the first two), `autograd.py` (the joint
graph), `choose_externs.py` (the previews), `compile.py` and `scheduling.py` (the rest).  The same tuples serve
just-in-time compilation, export ahead of time (`aot.py`) and trials of alternatives.

Strict numerics (`Options.exact`) leave out every pass that changes the order of computation.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from torch import fx

from fusion.attention.flex_attention import decompose_flex_attention
from fusion.codegen.target import EVERY, Capabilities
from fusion.dumps.graph_files import graph_text
from fusion.dynamo.autocast import widen_resized_images
from fusion.dynamo.kept_strides import keep_strides
from fusion.dynamo.native_attention import decompose_native_attention
from fusion.dynamo.nested_regions import inline_regions
from fusion.dynamo.shared_writes import refuse_shared_writes
from fusion.dynamo.unread_rows import skip_unread_rows
from fusion.dynamo.unused_results import keep_unused_results
from fusion.dynamo.windows import separate_written_windows
from fusion.inspect.named_parts import cluster_parts, graph_parts, halves_parts, launch_parts, program_parts
from fusion.inspect.text import launches_text, program_text
from fusion.joint.channels_last import prefer_channels_last
from fusion.joint.columns import multiply_columns
from fusion.joint.common_subexpressions import eliminate_common_subexpressions
from fusion.joint.comparisons import keep_comparisons
from fusion.joint.complex_pairs import split_complex_numbers
from fusion.joint.copies import drop_copies
from fusion.joint.detached import drop_detached
from fusion.joint.head_widths import specialise_head_widths
from fusion.joint.joined_gradients import join_gradients
from fusion.joint.layout import lay_out_gradients
from fusion.joint.loss_gradients import compute_loss_gradients
from fusion.joint.maxima import drop_vanishing_gradients
from fusion.joint.patches import multiply_patches, multiply_pixels, multiply_windows
from fusion.joint.positions import narrow_positions
from fusion.joint.reassociate import reassociate
from fusion.joint.recomputation import prefer_recomputed_products, prefer_views_of_inputs
from fusion.joint.row_layouts import prefer_rows
from fusion.joint.saved import keep_unchanged, mark_donated, widen_statistics
from fusion.joint.seeds import hide_unused_random, share_seeds
from fusion.lowering.verify import verify_program
from fusion.runner import adapters
from fusion.runner.contexts import Capturing, Deriving, ForwardBackward, Joint, Planned, Scheduled, Scheduling
from fusion.runner.passes import Pass, Stage, in_place
from fusion.runtime.dispatch_guards import refuse_fake_inputs, refuse_negated_inputs
from fusion.schedule.chained import chain_products
from fusion.schedule.chained.mask_bounds import bound_masks
from fusion.schedule.chained.skipped_checks import keep_skipped_checks
from fusion.schedule.chunks import chunk_products
from fusion.schedule.launches.chain import chain_last_steps
from fusion.schedule.launches.last_block import reduce_in_last_block
from fusion.schedule.launches.pack import pack_launches
from fusion.schedule.launches.shift_means import shift_means
from fusion.schedule.layouts.aligned_rows import align_rows
from fusion.schedule.layouts.copy_layouts import write_in_copy_layout
from fusion.schedule.layouts.round_on_store import round_on_store
from fusion.schedule.layouts.scatter_in_place import scatter_in_place
from fusion.schedule.layouts.scattered_operands import copy_scattered_operands
from fusion.schedule.layouts.stored_once import drop_constant_axes, merge_equal_maps
from fusion.schedule.layouts.tile_order import order_for_tiles
from fusion.schedule.layouts.transposed_reads import copy_transposed_reads
from fusion.schedule.library.choice import leave_lone_products
from fusion.schedule.overrides import GROW_CLUSTERS, LIBRARY
from fusion.schedule.reductions.scans import split_scans
from fusion.schedule.reductions.scatter_copies import copy_elements
from fusion.schedule.reductions.split import split_reductions
from fusion.schedule.rewrites.distinct_elements import map_distinct_elements
from fusion.schedule.rewrites.index_tables import tabulate_differences
from fusion.schedule.rewrites.inline import inline_cheap_maps
from fusion.schedule.rewrites.one_hot_sums import select_terms
from fusion.schedule.rewrites.power_differences import subtract_exactly
from fusion.schedule.rewrites.vector_products import sum_few_rows
from fusion.schedule.rewrites.windows import unroll_windows

# Dynamo's graph: a user's region before autograd is derived -----------------------------------------------------------


def _left_out(at: Capturing | Deriving | Scheduling) -> Collection[str]:
    return at.overrides.without


CAPTURED: Stage[fx.GraphModule, Capturing] = Stage(
    "captured",
    (
        in_place("inline_regions", lambda graph, at: inline_regions(graph), needed=True),
        in_place(
            "refuse_fake_inputs", lambda graph, at: refuse_fake_inputs(graph), when=lambda at: at.launched, needed=True
        ),
        in_place("refuse_negated_inputs", lambda graph, at: refuse_negated_inputs(graph), needed=True),
        in_place("refuse_shared_writes", lambda graph, at: refuse_shared_writes(graph), needed=True),
        in_place("separate_written_windows", lambda graph, at: separate_written_windows(graph), needed=True),
        in_place("keep_strides", lambda graph, at: keep_strides(graph), needed=True),
        in_place("keep_unused_results", lambda graph, at: keep_unused_results(graph), needed=True),
    ),
    check=adapters.lint,
    text=graph_text,
    parts=graph_parts,
    left_out=_left_out,
)
"""Refuses (`Unsupported`) a region that has to run eagerly, and prevents errors of AOTAutograd."""


def _relaxed(at: Capturing) -> bool:
    return not at.options.exact


PREPARED: Stage[fx.GraphModule, Capturing] = Stage(
    "prepared",
    (
        in_place("fix_constant_floats", adapters.fix_constant_floats, needed=True),
        in_place("widen_resized_images", lambda graph, at: widen_resized_images(graph), needed=True),
        in_place("decompose_native_attention", lambda graph, at: decompose_native_attention(graph), when=_relaxed),
        in_place("decompose_flex_attention", lambda graph, at: decompose_flex_attention(graph), when=_relaxed),
        in_place("choose_attention", lambda graph, at: at.choose_attention(graph), when=_relaxed),
        in_place("skip_unread_rows", lambda graph, at: skip_unread_rows(graph, at.options.workspace), when=_relaxed),
    ),
    check=adapters.lint,
    text=graph_text,
    parts=graph_parts,
    first=len(CAPTURED.passes) + 1,
    left_out=_left_out,
)
"""Makes the decisions that need the program's own operations, before they are decomposed."""

# The joint graph of forward and backward ------------------------------------------------------------------------------


def _inexact(at: Deriving) -> bool:
    return not at.exact


def _can_chain(at: Deriving) -> bool:
    return at.can_chain and not at.exact


def _generates(at: Deriving) -> bool:
    return at.can_chain and not at.exact and at.overrides.products != LIBRARY


JOINT: Stage[Joint, Deriving] = Stage(
    "joint",
    (
        in_place("lay_out_gradients", lambda joint, at: lay_out_gradients(joint.graph, joint.results), when=_inexact),
        in_place("split_complex_numbers", lambda joint, at: split_complex_numbers(joint.graph), when=_inexact),
        in_place("multiply_patches", lambda joint, at: multiply_patches(joint.graph), when=_inexact),
        in_place(
            "prefer_channels_last", lambda joint, at: prefer_channels_last(joint.graph, at.layouts), when=_inexact
        ),
        in_place("multiply_windows", lambda joint, at: multiply_windows(joint.graph), when=_inexact),
        in_place("prefer_rows", lambda joint, at: prefer_rows(joint.graph, at.layouts), when=_inexact),
        in_place("share_seeds", lambda joint, at: share_seeds(joint.graph), needed=True),
        in_place("drop_detached", lambda joint, at: drop_detached(joint.graph), when=_inexact),
        in_place("drop_copies", lambda joint, at: drop_copies(joint.graph), when=_inexact),
        in_place("specialise_head_widths", lambda joint, at: specialise_head_widths(joint.graph), when=_can_chain),
        in_place("drop_vanishing_gradients", lambda joint, at: drop_vanishing_gradients(joint.graph), when=_inexact),
        in_place(
            "compute_loss_gradients",
            adapters.keep(lambda graph, at: compute_loss_gradients(graph, at.workspace)),
            when=_inexact,
        ),
        in_place("reassociate", lambda joint, at: reassociate(joint.graph), when=_can_chain),
        in_place("keep_comparisons", adapters.keep(lambda graph, at: keep_comparisons(graph)), when=_inexact),
        in_place("narrow_positions", adapters.keep(lambda graph, at: narrow_positions(graph)), when=_inexact),
        in_place("prefer_views_of_inputs", lambda joint, at: prefer_views_of_inputs(joint.graph), when=_inexact),
        in_place(
            "prefer_recomputed_products",
            lambda joint, at: prefer_recomputed_products(joint.graph),
            when=_can_chain,
        ),
        in_place("return_saved_values", adapters.return_saved_values, needed=True),
        in_place("eliminate_common_subexpressions", lambda joint, at: eliminate_common_subexpressions(joint.graph)),
        in_place("hide_unused_random", lambda joint, at: hide_unused_random(joint.graph), needed=True),
    ),
    check=lambda joint, at: joint.graph.graph.lint(),
    text=lambda joint: graph_text(joint.graph),
    parts=lambda joint: graph_parts(joint.graph),
    left_out=_left_out,
)
"""Prepares the joint graph for the min-cut partition."""


PARTITIONED: Stage[ForwardBackward, Deriving] = Stage(
    "partitioned",
    (
        in_place("restore_unused_random", adapters.restore_in_both, needed=True),
        in_place("drop_saved_results", adapters.drop_saved_results, needed=True),
        in_place(
            "join_gradients",
            lambda halves, at: join_gradients(halves.backward, at.capabilities.rates),
            when=_inexact,
        ),
        in_place("widen_statistics", adapters.on_saved(widen_statistics), when=_inexact),
        in_place("keep_unchanged", adapters.on_saved(keep_unchanged), needed=True),
        in_place("mark_donated", adapters.on_saved(mark_donated), when=_inexact),
    ),
    check=lambda halves, at: [half.graph.lint() for half in (halves.forward, halves.backward)],
    text=lambda halves: chain(graph_text(halves.forward, "forward."), graph_text(halves.backward, "backward.")),
    first=len(JOINT.passes) + 1,
    parts=lambda halves: halves_parts(halves.forward, halves.backward),
    left_out=_left_out,
)
"""Decides which values backward gets from forward, and in which precision, and joins its products."""


INFERENCE: Stage[fx.GraphModule, Deriving] = Stage(
    "inference",
    (
        in_place("split_complex_numbers", lambda graph, at: split_complex_numbers(graph), when=_inexact),
        in_place("multiply_patches", lambda graph, at: multiply_patches(graph), when=_inexact),
        in_place("prefer_channels_last", lambda graph, at: prefer_channels_last(graph, at.layouts), when=_inexact),
        in_place("multiply_columns", lambda graph, at: multiply_columns(graph, at.capabilities), when=_generates),
        in_place("multiply_windows", lambda graph, at: multiply_windows(graph), when=_inexact),
        in_place("multiply_pixels", lambda graph, at: multiply_pixels(graph), when=_inexact),
        in_place("prefer_rows", lambda graph, at: prefer_rows(graph, at.layouts), when=_inexact),
        in_place("specialise_head_widths", lambda graph, at: specialise_head_widths(graph), when=_can_chain),
    ),
    check=adapters.lint,
    text=graph_text,
    parts=graph_parts,
    left_out=_left_out,
)
"""The passes of the joint graph that also apply to a graph without gradients."""

# The Program ----------------------------------------------------------------------------------------------------------


def _sums_few_rows(at: Scheduling) -> bool:
    return at.capabilities.few_rows > 0 and at.overrides.products != LIBRARY


def _chains(at: Scheduling) -> bool:
    return at.overrides.chains and not at.invariant


def _fuses(at: Scheduling) -> bool:
    return at.overrides.fused


def _chains_launches(at: Scheduling) -> bool:
    return at.overrides.fused and not at.invariant  # the last program of a launch folds in steps of its own


def _limits(at: Scheduling) -> Capabilities | None:
    return None if at.target is None else at.capabilities


def _leaves_lone_products(at: Scheduling) -> bool:
    return at.overrides.leaves_products and not at.capabilities.lone_products.keys() >= EVERY.keys()


PROGRAM: Stage[Scheduled, Scheduling] = Stage(
    "program",
    (
        Pass("write_in_copy_layout", adapters.on_program(lambda program, at: write_in_copy_layout(program))),
        Pass(
            "subtract_exactly",
            adapters.on_program(lambda program, at: subtract_exactly(program)),
            when=lambda at: not at.machine.numerics.strict,
        ),
        Pass("map_distinct_elements", adapters.on_program(lambda program, at: map_distinct_elements(program))),
        Pass("inline_cheap_maps", adapters.on_program(lambda program, at: inline_cheap_maps(program)), when=_fuses),
        Pass(
            "tabulate_differences",
            adapters.on_program(lambda program, at: tabulate_differences(program, at.hints)),
            when=_fuses,
        ),
        Pass("drop_constant_axes", adapters.on_program(lambda program, at: drop_constant_axes(program)), when=_fuses),
        Pass("merge_equal_maps", adapters.on_program(lambda program, at: merge_equal_maps(program)), when=_fuses),
        Pass("scatter_in_place", adapters.on_program(lambda program, at: scatter_in_place(program))),
        Pass("select_terms", adapters.on_program(lambda program, at: select_terms(program))),
        Pass(
            "chunk_products",
            adapters.on_program(lambda program, at: chunk_products(program, at.capabilities, at.workspace, at.hints)),
            when=lambda at: not at.invariant,
        ),
        Pass("split_scans", adapters.on_program(lambda program, at: split_scans(program, at.capabilities))),
        Pass("unroll_windows", adapters.on_program(lambda program, at: unroll_windows(program, at.capabilities))),
        Pass(
            "chain_products",
            adapters.with_chains(lambda scheduled, at: chain_products(scheduled.program, at.capabilities, at.hints)),
            when=_chains,
        ),
        Pass("bound_masks", adapters.on_chains(bound_masks), when=_chains),
        Pass("keep_skipped_checks", adapters.on_chains(keep_skipped_checks), when=_chains, needed=True),
        Pass(
            "sum_few_rows",
            adapters.with_chains(
                lambda scheduled, at: sum_few_rows(scheduled.program, scheduled.chains, at.capabilities)
            ),
            when=_sums_few_rows,
        ),
        Pass(
            "leave_lone_products",
            adapters.with_chains(
                lambda scheduled, at: leave_lone_products(scheduled.program, scheduled.chains, at.capabilities)
            ),
            when=_leaves_lone_products,
        ),
        Pass("order_for_tiles", adapters.on_chains(order_for_tiles), when=_chains),
        Pass("copy_scattered_operands", adapters.on_chains(copy_scattered_operands)),
        Pass("copy_transposed_reads", adapters.on_chains(copy_transposed_reads)),
        Pass("round_on_store", adapters.on_program(lambda program, at: round_on_store(program))),
        # After inlining, so that a split reduction contains its producers; after chains, which have their own parts.
        Pass(
            "split_reductions",
            lambda scheduled, at: scheduled.changed(
                split_reductions(scheduled.program, at.capabilities, scheduled.chains, at.hints)
            ),
        ),
        Pass(
            "copy_elements", adapters.on_program(lambda program, at: copy_elements(program, at.capabilities, at.hints))
        ),
        Pass("align_rows", adapters.on_program(lambda program, at: align_rows(program, at.capabilities, at.hints))),
    ),
    check=lambda scheduled, at: verify_program(scheduled.program, at.verified),
    text=lambda scheduled: program_text(scheduled.program),
    first=2,
    parts=lambda scheduled: program_parts(scheduled.program),
    left_out=_left_out,
)
"""Program → Program: equivalent programs that fuse better."""

PREVIEW_MAPS = PROGRAM.only("preview_maps", "inline_cheap_maps", "select_terms")
PREVIEW_LOOPS = PROGRAM.only("preview_loops", "chunk_products", "chain_products")
"""Passes of PROGRAM that show which products a loop would consume, before others are left to the library
(`compilation/choose_externs.py`): PREVIEW_MAPS determines the products, PREVIEW_LOOPS those that one loop computes."""

PREVIEWS = (PREVIEW_MAPS.name, PREVIEW_LOOPS.name)
"""The stages that run on a copy, which `choose_externs` discards."""


CLUSTERS: Stage[Scheduled, Scheduling] = Stage(
    "clusters",
    (
        Pass("grow_clusters", adapters.grow_clusters, needed=True),
        Pass("choose_library", adapters.choose_library),
    ),
    check=lambda scheduled, at: verify_program(scheduled.program, at.verified),
    text=lambda scheduled: program_text(scheduled.program, scheduled.clustering, scheduled.choices),
    first=PROGRAM.first + len(PROGRAM.passes),
    parts=lambda scheduled: cluster_parts(scheduled.program, scheduled.clustering),
    left_out=_left_out,
)
"""Decides which nodes become one kernel, and which products stay library calls."""

# Launches -------------------------------------------------------------------------------------------------------------


def _shares_launches(at: Scheduling) -> bool:
    return at.target is not None and at.overrides.fused


LAUNCHES: Stage[Planned, Scheduling] = Stage(
    "launches",
    (
        Pass("make_kernels", adapters.make_kernels, needed=True),
        Pass(
            "reduce_in_last_block",
            adapters.on_steps(lambda planned, at: reduce_in_last_block(planned.steps, planned.program, at.machine)),
            when=_shares_launches,
        ),
        Pass(
            "chain_last_steps",
            adapters.on_steps(lambda planned, at: chain_last_steps(planned.steps, _limits(at))),
            when=_chains_launches,
        ),
        Pass(
            "pack_launches",
            adapters.on_steps(lambda planned, at: pack_launches(planned.steps, planned.program, at.machine)),
            when=_shares_launches,
        ),
        Pass(
            "shift_means",
            adapters.on_steps(lambda planned, at: shift_means(planned.steps)),
            when=lambda at: not at.invariant,
        ),
        Pass("update_in_place", adapters.update_in_place),
        Pass("reuse_memory", adapters.reuse_memory),
    ),
    check=adapters.verify_kernels,
    text=lambda planned: launches_text(planned.steps),
    first=CLUSTERS.first + len(CLUSTERS.passes),
    parts=lambda planned: launch_parts(planned.steps),
    left_out=_left_out,
)
"""Decides which kernels share a launch, and which memory their results reuse."""

STAGES = (CAPTURED, PREPARED, JOINT, PARTITIONED, INFERENCE, PROGRAM, CLUSTERS, LAUNCHES)
"""Every stage, in the order of the path, except the previews, which repeat passes of PROGRAM."""

OPTIONAL = tuple(
    name for stage in STAGES for name in (*([GROW_CLUSTERS] if stage is CLUSTERS else []), *stage.optional)
)
"""The passes that can be left out (`Overrides.without`), as "stage/pass", in order."""
