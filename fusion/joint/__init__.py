"""The joint graph: what is decided about forward and backward together, before they are parted.

What enters is the functional ATen graph of both, as AOTAutograd traces it.  It is changed in place and computes the
same, up to rounding.  `capture.py` calls what stands in this folder in order; what is done for the partition's sake is
one step of that, `prepare`:

1. views that only autograd knows of go, as do copies that lie alike (`copies.py`), and widths of heads become numbers
   (`widths.py`);
2. gradients of maxima that cancel are not computed (`maxima.py`), those of what is too large to keep are computed in
   forward (`ahead.py`), and sums that the graph holds in another order are taken from there (`reassociate.py`);
3. forward compares floats for equality (`comparisons.py`), and keeps positions in few bytes (`positions.py`);
4. what backward makes again, rather than forward saving it, is marked: views of inputs (`given.py`), tiles
   (`tiles.py`), copies for their products.

Before it, gradients are laid out (`layout.py`), complex numbers parted (`pairs.py`), convolutions and norms given the
strides that they want (`formats.py`, `rows.py`, by plans of `strides.py`), and seeds shared (`seeds.py`).  Behind it,
what is there twice is merged (`repeated.py`), and what is kept once the graph is parted is kept exactly (`saved.py`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.joint.ahead import compute_ahead
from fusion.joint.comparisons import keep_comparisons
from fusion.joint.copies import copies_for_products, drop_copies
from fusion.joint.factors import PRODUCTS
from fusion.joint.given import views_of_inputs
from fusion.joint.maxima import drop_vanishing_gradients
from fusion.joint.positions import narrow_positions
from fusion.joint.reassociate import reassociate
from fusion.joint.tiles import grows, short
from fusion.joint.widths import fix_widths
from fusion.lowering.sizes import elements, size_of
from fusion.options import WORKSPACE


def prepare(joint: fx.GraphModule, *, streams: bool, workspace: int = WORKSPACE) -> list[fx.Node]:
    """Ready a joint graph for its partition.

    Args:
        streams: can contractions be part of generated kernels, and so be made again where they are needed?
        workspace: bytes above which a product is not to be kept.

    Returns:
        What forward has to compute and keep, though only backward needs it.
    """
    drop_detached(joint)
    drop_copies(joint)
    if streams:
        fix_widths(joint)
    drop_vanishing_gradients(joint)
    kept = compute_ahead(joint, workspace)
    if streams:
        reassociate(joint)
    kept += keep_comparisons(joint)
    kept += narrow_positions(joint)
    for view in views_of_inputs(joint):
        _prefer(view)
    if streams:
        prefer_recomputation(joint)
    return kept


def drop_detached(joint: fx.GraphModule) -> None:
    """Read values themselves instead of views of them that autograd does not follow: there is nothing left to follow.

    Operations whose gradient is made of their result (softmax, tanh, exp) read it through such a view.  The partition
    takes that for a reader that no kernel could hold, and would save the result whatever its size.  A view that is
    returned stays: AOTAutograd says of it that it has no gradient, which must not be said of the value itself.
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            joint.graph.erase_node(node)
    joint.recompile()


def prefer_recomputation(joint: fx.GraphModule) -> None:
    """Mark what backward had better make again: large products, maps of them, copies that only such products read, and
    what is made of constants (masks).

    A product is large if it is larger than its operands.  What has to be saved stays so.
    """
    constant: set[fx.Node] = set()
    tiles: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            constant.add(node)  # sizes are there in any case
            continue
        if node.op != "call_function" or _is_random(node):
            continue
        if all(arg in constant for arg in node.all_input_nodes):
            constant.add(node)
        elif _grows(node) or (node.target not in PRODUCTS and _is_map_of(node, tiles)):
            tiles.add(node)
        else:
            continue
        _prefer(node)
    for copy in copies_for_products(joint, tiles):
        _prefer(copy)


def _prefer(node: fx.Node) -> None:
    if not any(user.op == "output" for user in node.users):
        node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_map_of(node: fx.Node, tiles: Collection[fx.Node]) -> bool:
    """Is this an operation on a tile that gives one as large?"""
    made = node.meta.get("val")
    taken = [arg.meta["val"] for arg in node.all_input_nodes if arg in tiles]
    return isinstance(made, torch.Tensor) and any(elements(made.shape) >= elements(val.shape) for val in taken)


def _grows(node: fx.Node) -> bool:
    """Is this a product over a short axis of known length, larger than its operands together?"""
    return node.target in PRODUCTS and size_of(short(node)).is_Integer and grows(node)
