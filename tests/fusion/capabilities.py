"""Capabilities of a target that can generate everything, for tests that stop before anything is generated."""

from __future__ import annotations

import torch

from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.target import Capabilities


def of_everything(device: torch.device) -> Capabilities:
    """Return the capabilities of the reference target, for any device."""
    return ReferenceTarget().capabilities
