"""Config: the parameters of a warp-specialised program."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.codegen.triton.blocks import Config


@dataclass(frozen=True, slots=True)
class WarpSpecialisedConfig(Config):
    """One way to launch a warp-specialised chained product.

    Attributes:
        groups: one warp fetches, and so many groups of four warps compute.
    """

    groups: int = 2

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        return ["persistent", f"{self.groups} groups"]


def groups_of(config: Config) -> int:
    """How many groups of four warps compute."""
    assert isinstance(config, WarpSpecialisedConfig)
    return config.groups
