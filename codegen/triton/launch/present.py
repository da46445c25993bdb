"""Present: the architecture of a device of this machine, by our name for it, without Triton's driver."""

from __future__ import annotations

import torch


def arch_at(device: int) -> str:
    """The architecture of the CUDA or ROCm device of that number."""
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
