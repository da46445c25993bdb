"""Config: the parameters of a warp-specialised program."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.codegen.triton.blocks import Config


@dataclass(frozen=True, slots=True)
class WarpSpecialisedConfig(Config):
    """A configuration of a warp-specialised chained product.

    Attributes:
        groups: groups of four warps that compute; one more warp loads.
    """

    groups: int = 2

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        return ["persistent", f"{self.groups} groups"]


def groups_of(config: Config) -> int:
    """Return the number of groups of four warps that compute."""
    assert isinstance(config, WarpSpecialisedConfig)
    return config.groups
