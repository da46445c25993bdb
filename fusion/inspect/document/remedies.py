"""Suggests changes that would allow a refused fusion.

Input: the reason of a refusal, as the scheduler writes it; output: the change, in the program, its options or the
compiler, that removes this reason.  Another reason may stand behind it.
"""

from __future__ import annotations

NO_RULE = "A rule for the operation, or for these arguments of it: docs/how-to/operation.md shows how to add one."
UNKNOWN = "A change of the rule that refuses it: docs/how-to/fusion-rule.md shows where."
OWN_POINTS = "A reader at the points where it is computed: without a shift, a flip or a transposition in between."
SAME_AXES = (
    "Shapes that are rearrangements of each other: equal sizes on both sides, or a reshape that cuts the same axes."
)
MATRICES = "A contiguous copy of the operand, so that it is one matrix in each batch."

CALLS: tuple[tuple[str, str], ...] = (
    (
        "leaves matrix products to the library",
        "Generated products that are as fast as the library's on this CPU: `fusion calibrate` measures them.",
    ),
    (
        "the library is faster",
        "A faster form of the generated product: both are among the alternatives; mode='max-autotune' times them.",
    ),
)
"""Part of the reason for a library call → a change that would allow to generate it; the first match counts."""

EDGES: tuple[tuple[str, str], ...] = (
    (
        "it would take longer",
        "Nothing, if the prediction is right: measure=True puts the clock beside it. It changes with the sizes of the "
        "program, and with the speeds of the device (`fusion calibrate`).",
    ),
    (
        "it is faster to store",
        "Nothing, if the prediction is right: the alternatives of the product are in its record, and mode="
        '"max-autotune" times them.',
    ),
    ("is compared with itself", "Nothing: a recomputed number could differ from itself in its last bit."),
    ("in another order", "Other numerics: under batch-invariant ones a sum keeps its own order."),
    ("different devices", "Tensors on one device."),
    ("has no elements", "Nothing: an empty tensor costs nothing."),
    ("would hold more than", "Fewer operations between two tensors that are stored anyway."),
    ("would take more than", "Fewer tensors at this place, or a target that passes more of them to one kernel."),
    ("must run in between", "The operation in between in the same kernel: see its own refusals."),
    ("no candidate", "A reader nearer to the tensor: of its readers only the next few are tried together."),
    ("may collide", "Indices that do not collide, such as those of an `arange` or of a slice."),
    (
        "scatter",
        "A gather, if each element is written once: colliding writes are complete only at the end.",
    ),
    ("with no other fold", "The reduction outside of the kernel of the product, before or after it."),
    ("would feed the contraction", "A factor that does not vary along the sum, which moves behind it."),
    ("contractions that share no operand", "Products of the same operand: those share a loop."),
    ("contraction", "Products over the same axes, whose results are read as they are computed."),
    ("another index than its own", OWN_POINTS),
    ("index other than its own", OWN_POINTS),
    ("past its ends", "A reader within the bounds of the tensor: padding before it, not after."),
    ("across the axis", "Both sides along the same axis: a reduction over the same dimension."),
    ("run over different lengths", "Reductions of equal length."),
    ("spreads over programs", "Both sides along the same axis: a reduction over the same dimension."),
    ("along its axis alone", "A scan that no reduction over another axis reads."),
    ("each of its points once", OWN_POINTS),
    (
        "needed elsewhere too",
        "A tensor that only this kernel reads: not among the results of the region, nor saved for backward.",
    ),
    ("the rows of one are not the rows", "A sum over the rows of the same matrix whose columns are folded."),
    ("conditions of their own", "Sums that read all rows of the matrix, and no others."),
    ("that a program holds", "Shorter rows: a program holds a whole row beside the sums of its columns."),
    ("rows are longer than", "Shorter rows: a program holds a whole row beside the sums of its columns."),
    ("part of the rows is shorter", "A number of rows that divides into equal parts, about one to a multiprocessor."),
    ("read along the row", OWN_POINTS),
    ("a row is a part of", "Rows that end where those of the sum end."),
    ("stored by several programs", "Results with one value for each row, or each of its elements."),
    ("only after the last row", "Nothing: the sum needs all rows first."),
    ("at another point than its own", OWN_POINTS),
    ("common placed reader", "A reader of both over the same axes."),
    ("axes", SAME_AXES),
    ("one dimension", MATRICES),
    ("more than a matrix", MATRICES),
)
"""Part of the reason for which two operations stay apart → a change that would fuse them; the first match counts."""


def remedy(reason: str) -> str:
    """Return the change that would remove the reason of a refusal.

    >>> remedy("different devices: cpu and cuda:0")
    'Tensors on one device.'
    >>> remedy("aten.scatter.src is an extern") == NO_RULE
    True
    """
    name, is_call, why = reason.partition(" is an extern")
    if not is_call:
        return _first(EDGES, reason, UNKNOWN)
    if name == "in_chunks":
        return "A tensor that fits into the workspace: the region runs in chunks because it does not."
    return _first(CALLS, why, NO_RULE)


def remedy_of_call(why: str) -> str:
    """Return the change that would allow a library call, kept for the reason `why`, to be generated."""
    return _first(CALLS, why, NO_RULE)


def _first(remedies: tuple[tuple[str, str], ...], reason: str, otherwise: str) -> str:
    return next((text for part, text in remedies if part in reason), otherwise)


__all__ = ["NO_RULE", "UNKNOWN", "remedy", "remedy_of_call"]
