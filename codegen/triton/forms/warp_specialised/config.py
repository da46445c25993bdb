"""Defines the configuration of warp-specialised attention, and the blocks of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.codegen.triton.blocks import Config, Dim
from fusion.codegen.triton.expressions.code import PRODUCT, Code, as_code, compose
from fusion.codegen.triton.expressions.indices import Layout

GROUP_ROWS = 64
"""Rows of a block that one group computes."""


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


def shape(layout: Layout, dims: Sequence[Dim], parted: Dim) -> list[Code]:
    """Return the shape of a block over `dims`, of which one is divided between the groups."""
    count = groups_of(layout.config)
    return [
        compose("{} // {}", dim.constant, count, binds=PRODUCT) if dim is parted else as_code(dim.constant)
        for dim in dims
    ]
