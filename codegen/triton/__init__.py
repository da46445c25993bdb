"""The Triton target: kernels for NVIDIA and AMD GPUs, as Triton source that a person could have written.

blocks → indices → values / reduce / contract / descriptors → body → tail → emit   a Kernel becomes text
load → aot → counters → build, or interpreted                                      text becomes a launcher
"""

from __future__ import annotations

from codegen.triton.configs import Config
from codegen.triton.target import TritonTarget

__all__ = ["Config", "TritonTarget"]
