"""Persistent: which configuration of the persistent form (`descriptors`) is predicted to be the fastest.

What enters are contractions to which the form applies; what leaves are configurations, the best first, and the share of
the library's speed that each is predicted to reach.  A block takes as long as its sum, and as long again as `end` more
elements of it: then its result is finished and stored, and the matrix units wait.  How long that is depends on what
is computed for each element (`work`) and on whether tiles are loaded for it.  Two programs on a multiprocessor hide
part of it behind each other's products.  Numbers are fitted to measurements on an H200 over the shapes of transformer
layers, with ReLU, both forms of GELU, and a residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.codegen.triton.blocks import PROGRAMS, Blocked, Config, extent, full_rounds, programs
from fusion.codegen.triton.products.descriptors import NARROWEST, applies, divided, loads_tiles, stack_of, tile_loads
from fusion.codegen.triton.rewrites.sigmoids import as_sigmoids
from fusion.lowering.expr import Expr, Op, TileRef, postorder
from fusion.lowering.kernel import Store, values_of
from fusion.lowering.sizes import with_values


@dataclass(frozen=True, slots=True)
class _Form:
    """A configuration, and how fast it is.

    Attributes:
        share: of the library's speed, for long sums.
        apart: the same for several products that are not one (`stacked`), each with too few columns for the units.
        joined: the same for products that are one walk; 0 where it does not differ.
        slope: elements of the sum that an operation on each result takes as long as.
        loading: elements of the sum that tiles loaded for the end take as long as.
    """

    config: Config
    share: float
    apart: float
    joined: float = 0.0
    end: int = 137
    slope: float = 12.0
    loading: int = 740


def _config(m: int, n: int, warps: int, stages: int, each: int = 1, parts: int = 1) -> Config:
    blocks = (("m", m), ("k", 64), ("n", n))
    return Config(blocks, num_warps=warps, num_stages=stages, persistent=True, per_processor=each, parts=parts)


_FORMS = (
    _Form(_config(128, 256, 8, 3), 0.958, 0.958, loading=2000),  # with tiles, memory is left for two stages
    _Form(_config(128, 256, 8, 3, parts=2), 0.98, 0.0, end=200, slope=16.0, loading=357),
    _Form(_config(128, 256, 8, 4, parts=2), 0.95, 0.0, joined=0.972, loading=2000),
    _Form(_config(256, 128, 8, 4, parts=2), 0.945, 0.0, loading=2000),
    _Form(_config(128, 128, 8, 3, each=2, parts=2), 0.904, 0.0, end=91, slope=8.0, loading=2000),
    _Form(_config(128, 128, 4, 3, each=2, parts=2), 0.942, 0.0, end=118, slope=10.7, loading=2000),
    _Form(_config(128, 128, 8, 4), 0.89, 0.66),
    _Form(_config(64, 256, 4, 4), 0.88, 0.62),
    _Form(NARROWEST, 0.81, 0.70, slope=9.0),
)
_LIBRARY_END = 215
"""Elements of the sum that the end of a block takes as long as in the library's products, which finish nothing else."""

_CACHE, _END, _STREAMED, _STREAMED_END = 50 << 20, 137, 1.096, 300
"""Bytes of a result above which it is on its way to memory, which the library hides better: in elements of the sum, the
end of a block takes 300, not the 137 of smaller results.  (H200, 512 to 8192 rows times 32000 to 128256 columns, the
library's time over ours: 0.93 to 0.98 for sums of 768, 0.94 to 0.99 of 1024, 0.97 to 1.01 of 2048.)"""

_WORK = {"exp": 6, "exp2": 6, "log": 6, "log2": 6, "truediv": 9, "rsqrt": 9, "sqrt": 9, "tanh": 30, "erfc": 31}
_FUNCTIONS = {"erf", "expm1", "log1p", "log10", "sin", "cos", "tan", "pow", "atan", "atan2", "sinh", "cosh", "lgamma"}
_FUNCTION, _FREE = 50, 3


def candidates(blocked: Blocked, arch: str) -> tuple[Config, ...]:
    """Configurations of the persistent form, best first; none where the rule does not hold."""
    if not applies(blocked, arch):
        return ()
    return tuple(divided(config, len(blocked.dots)) for config in _ranked([blocked]))


def together(parts: Sequence[Blocked], *, joined: bool = False) -> list[Config]:
    """The best of the persistent form for each of several kernels to which it `applies`, walked in one launch.

    They may be `joined` in one walk.
    """
    best = _ranked(parts, joined=joined)[0]
    return [divided(best, len(part.dots)) for part in parts]


def speed(blocked: Blocked, config: Config) -> float:
    """The share of the library's speed that is predicted for a configuration, on the blocks of this kernel."""
    count = len(blocked.dots)
    shares = _shares([blocked])
    return max(shares[form] * _used([blocked], form) for form in shares if divided(form, count) == config)


def reached(blocked: Blocked) -> float:
    """The share of the library's speed that is predicted for the best configuration, were the last round full."""
    best = _ranked([blocked])[0]
    share = _shares([blocked])[best]
    if _bytes(blocked, best) <= _CACHE:
        return share
    length = extent(blocked.of(blocked.dots[0].over)[0].size)
    return share * min(1.0, _STREAMED * (length + _END) / (length + _STREAMED_END))


def _bytes(blocked: Blocked, config: Config) -> int:
    """Bytes of the largest result, in whole blocks; of sizes that are not known as when they were traced."""
    widths = [stmt.value.dtype.itemsize for stmt in blocked.body if isinstance(stmt, Store)]
    blocks = programs(blocked, config, dict(blocked.kernel.traced))
    return blocks * config.block("m") * config.block("n") * max(widths, default=0)


def _ranked(parts: Sequence[Blocked], *, joined: bool = False) -> list[Config]:
    """Configurations for one product, best first."""
    shares = _shares(parts, joined=joined)
    return sorted(shares, key=lambda form: shares[form] * _used(parts, form), reverse=True)


def _shares(parts: Sequence[Blocked], *, joined: bool = False) -> dict[Config, float]:
    """Configurations for one product → the share of the library's speed with every multiprocessor busy."""
    single = all(len(part.dots) == 1 for part in parts)
    one = all(len(part.dots) == 1 or stack_of(part) for part in parts)
    length = min(extent(part.of(part.dots[0].over)[0].size) for part in parts)
    work, loading = max(map(work_of, parts)), any(map(loads_tiles, parts))
    found = {}
    for form in _FORMS:
        if single or form.config.parts == 1:
            end = form.end + form.slope * work + (form.loading if loading else 0)
            share = form.apart if not one else (form.joined if joined else 0.0) or form.share
            found[form.config] = share * (length + _LIBRARY_END) / (length + end)
    return found


def _used(parts: Sequence[Blocked], form: Config) -> float:
    """The share of what the device could multiply that is of the results: the last round of blocks leaves some of it
    idle, and blocks reach beyond the last row and column.
    """
    divisions = [(part, divided(form, len(part.dots))) for part in parts]
    blocks = sum(programs(part, config, dict(part.kernel.traced)) for part, config in divisions)
    if blocks < PROGRAMS:  # few rows when traced: that says nothing of calls with more, which take longer
        blocks = sum(programs(part, config) for part, config in divisions)
    columns = [(_columns(part), config.block("n")) for part, config in divisions]
    filled = sum(count for count, _ in columns) / max(1, sum(-(-count // width) * width for count, width in columns))
    return filled * full_rounds(blocks, PROGRAMS * form.per_processor)


def _columns(blocked: Blocked) -> int:
    """The columns of the results, with sizes that are not known as when they were traced."""
    (dim,) = (dim for dim in blocked.grid() if dim.name == "n")
    return extent(with_values(dim.size, dict(blocked.kernel.traced)))


def work_of(blocked: Blocked) -> int:
    """Operations for each element of the results, in additions, beyond the few that cost nothing beside their store.

    What is computed of loaded tiles counts as what is computed of the sums; of a row or column of numbers it does not.
    """
    stores = [stmt for stmt in as_sigmoids(blocked.body) if isinstance(stmt, Store)]
    nodes = list(postorder(*(value for stmt in stores for value in values_of(stmt))))
    made: set[Expr] = set(tile_loads(blocked, nodes))
    total = 0
    for node in nodes:
        if isinstance(node, TileRef) or any(child in made for child in node.children()):
            made.add(node)
            if isinstance(node, Op):
                total += _FUNCTION if node.name in _FUNCTIONS else _WORK.get(node.name, 1)
    return max(0, total - _FREE)
