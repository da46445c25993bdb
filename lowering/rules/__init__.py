"""The lowering rules, one module per family of operations.  Importing this package registers them all."""

from lowering.rules import (
    activation,
    arithmetic,
    assembly,
    contraction,
    conversion,
    creation,
    distance,
    gather,
    normalization,
    padding,
    pointwise,
    pooling,
    random,
    reduction,
    scatter,
    search,
    special,
    view,
)

# After all others: what it refuses is what they have no rule for.
from lowering.rules import library  # isort: skip

__all__ = [
    "activation",
    "arithmetic",
    "assembly",
    "contraction",
    "conversion",
    "creation",
    "distance",
    "gather",
    "library",
    "normalization",
    "padding",
    "pointwise",
    "pooling",
    "random",
    "reduction",
    "scatter",
    "search",
    "special",
    "view",
]
