"""Registers all lowering rules when it is imported, one module per family of operations.

Modules that are not imported here are used to write rules:
    formula.py     scalar expressions in the notation of formulas
    promotion.py   formulas on tensors: the dtype of the computation, and the shape
    series.py      Chebyshev series; `bessel_series.py` has the coefficients of `bessel.py`
    entries.py     small matrices, entry by entry
    windows.py     the window of positions that each element of the result reads
    places.py      the destination of each source of an indexed write; several sources may share one:
    collisions.py  as a scatter; `compared.py`: each element searches its sources; `runs.py`: sources sorted into runs
"""

from fusion.lowering.rules import (
    activation,
    arithmetic,
    assembly,
    bags,
    bessel,
    choices,
    contraction,
    conversion,
    creation,
    distance,
    elimination,
    floats,
    fractional,
    gather,
    histogram,
    losses,
    masked,
    normalization,
    ordering,
    orthogonal,
    padding,
    pointwise,
    pooling,
    put,
    random,
    reduction,
    resampling,
    sampling,
    scans,
    scatter,
    search,
    segments,
    selection,
    special,
    sums,
    triangular,
    view,
    zeta,
)

# After all others: it refuses operations that they have no rule for.
from fusion.lowering.rules import library  # isort: skip

__all__ = [
    "activation",
    "arithmetic",
    "assembly",
    "bags",
    "bessel",
    "choices",
    "contraction",
    "conversion",
    "creation",
    "distance",
    "elimination",
    "floats",
    "fractional",
    "gather",
    "histogram",
    "library",
    "losses",
    "masked",
    "normalization",
    "ordering",
    "orthogonal",
    "padding",
    "pointwise",
    "pooling",
    "put",
    "random",
    "reduction",
    "resampling",
    "sampling",
    "scans",
    "scatter",
    "search",
    "segments",
    "selection",
    "special",
    "sums",
    "triangular",
    "view",
    "zeta",
]
