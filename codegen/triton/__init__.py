"""The Triton target: kernels for NVIDIA and AMD GPUs, as Triton source that a person could have written.

kernel → rewrites → blocks → choices → expressions, loops, products, statements → body → ahead, tail, beside → file
text   → launch/load → launch/aot → launch/build, or launch/interpreted → launcher

`emit.py` is the path of a kernel to its text; each package decides one thing on it, and says what.
"""

from __future__ import annotations

from fusion.codegen.triton.blocks import Config
from fusion.codegen.triton.target import TritonTarget

__all__ = ["Config", "TritonTarget"]
