"""Config: the parameters of a persistent product, and the shared memory that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion.codegen.triton.blocks import Blocked, Config
from fusion.codegen.triton.forms import limits
from fusion.codegen.triton.products.descriptors import loads_tiles
from fusion.lowering.kernel import Store


@dataclass(frozen=True, slots=True)
class PersistentConfig(Config):
    """One way to launch a persistent product.

    Attributes:
        parts: the columns of a block are finished, loaded for and stored in so many parts.
        per_processor: how many programs share a multiprocessor; the products of one hide the epilogue of another.
    """

    parts: int = 1
    per_processor: int = 1

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        words = ["persistent" if self.per_processor == 1 else f"{self.per_processor} persistent"]
        return words + ([f"finished in {self.parts} parts"] if self.parts > 1 else [])


NARROWEST = PersistentConfig((("m", 64), ("k", 64), ("n", 128)))
"""The smallest blocks."""


def divided(config: PersistentConfig, count: int) -> PersistentConfig:
    """`config` with as many columns for each of `count` contractions as there are registers for."""
    columns = max(16, 1 << (config.block("n") // count).bit_length() - 1)
    return replace(config, blocks=tuple((name, columns if name == "n" else size) for name, size in config.blocks))


def fitted(blocked: Blocked, config: Config) -> PersistentConfig | None:
    """A configuration with as many stages as there is room for, beside the blocks that are stored and loaded."""
    assert isinstance(config, PersistentConfig)
    leaving = stored(blocked, config)
    found = limits.fitted(
        blocked,
        config,
        per_multiprocessor=config.per_processor,
        stored=leaving,
        loaded=leaving if blocked.dots and loads_tiles(blocked) else 0,
    )
    return None if found is None else replace(config, num_stages=found.num_stages)


def stored(blocked: Blocked, config: Config) -> int:
    """Bytes of a part of the block that a program stores at a time, on its way out."""
    assert isinstance(config, PersistentConfig)
    width = max((stmt.value.dtype.itemsize for stmt in blocked.body if isinstance(stmt, Store)), default=0)
    return config.block("m") * config.block("n") * min(width, 2) // config.parts  # wider ones pass by
