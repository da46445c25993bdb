"""Defines the parameters of a persistent product, and computes the shared memory that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion.codegen.triton.blocks import Blocked, Config
from fusion.codegen.triton.forms import limits
from fusion.codegen.triton.products.descriptors import tile_loads
from fusion.lowering.ir.kernel import Store, values_of


@dataclass(frozen=True, slots=True)
class PersistentConfig(Config):
    """A configuration of a persistent product.

    Attributes:
        parts: the number of column parts in which the epilogue of a block runs.
        per_processor: programs per multiprocessor; the products of one hide the epilogue of another.
    """

    parts: int = 1
    per_processor: int = 1

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        words = ["persistent" if self.per_processor == 1 else f"{self.per_processor} persistent"]
        return words + ([f"finished in {self.parts} parts"] if self.parts > 1 else [])


SHORTEST_SIDE = 128
"""Rows, columns and elements of a sum below which other forms are faster."""

NARROWEST = PersistentConfig((("m", 64), ("k", 64), ("n", 128)))
"""The smallest blocks."""


def divided(config: PersistentConfig, count: int) -> PersistentConfig:
    """Return `config` with as many columns for each of `count` contractions as registers hold."""
    columns = max(16, 1 << (config.block("n") // count).bit_length() - 1)
    return replace(config, blocks=tuple((name, columns if name == "n" else size) for name, size in config.blocks))


def fitted(blocked: Blocked, config: Config) -> PersistentConfig | None:
    """Return a configuration with as many stages as fit next to the blocks that are stored and loaded."""
    assert isinstance(config, PersistentConfig)
    limited = limits.fitted(
        blocked,
        config,
        per_multiprocessor=config.per_processor,
        stored=stored(blocked, config),
        loaded=loaded(blocked, config) if blocked.dots else 0,
    )
    return None if limited is None else replace(config, num_stages=limited.num_stages)


def stored(blocked: Blocked, config: Config) -> int:
    """Return the bytes of the part of a block that a program stores at a time through shared memory."""
    assert isinstance(config, PersistentConfig)
    width = max((stmt.value.dtype.itemsize for stmt in blocked.body if isinstance(stmt, Store)), default=0)
    return config.block("m") * config.block("n") * min(width, 2) // config.parts  # wider elements bypass shared memory


def loaded(blocked: Blocked, config: Config) -> int:
    """Return the bytes of the part of a tile that an epilogue loads at a time through shared memory."""
    assert isinstance(config, PersistentConfig)
    values = [value for stmt in blocked.body if isinstance(stmt, Store) for value in values_of(stmt)]
    width = max((load.dtype.itemsize for load in tile_loads(blocked, values)), default=0)
    return config.block("m") * config.block("n") * width // config.parts
