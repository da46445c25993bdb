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

__all__ = [
    "activation",
    "arithmetic",
    "assembly",
    "contraction",
    "conversion",
    "creation",
    "gather",
    "normalization",
    "pointwise",
    "random",
    "reduction",
    "view",
]
