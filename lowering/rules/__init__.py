"""The lowering rules, one module per family of operations.  Importing this package registers them all."""

from lowering.rules import (
    activation,
    arithmetic,
    assembly,
    contraction,
    conversion,
    creation,
    gather,
    normalization,
    pointwise,
    random,
    reduction,
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
    "gather",
    "library",
    "normalization",
    "pointwise",
    "random",
    "reduction",
    "view",
]
