"""The lowering rules, one module per family of operations.  Importing this package registers them all.

Modules that are not imported here are what rules are written with:

    formula.py    scalar expressions, written as one would on paper
    promotion.py  formulas on tensors: the dtype that is computed in, and the shape
    series.py     Chebyshev series; `bessel_series.py` has the coefficients of `bessel.py`
    entries.py    small matrices, one entry after the other
    windows.py    the few positions that each result looks at
    places.py     where the sources of a write go, of which several may be one element:
    meeting.py    as a scatter; `compared.py`, each element looks for its sources; `runs.py`, where these lie in a row
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

# After all others: what it refuses is what they have no rule for.
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
