"""Compiles kernels for NVIDIA and AMD GPUs: the Triton target writes readable Triton source.

kernel → rewrites → blocks → forms (applies, configs) → writer (body, expressions, loops, products, statements)
       → file → text
text   → launch/load → launch/aot → launch/build, or launch/interpreted → launcher

`emit` in `target.py` is the path of a kernel to its text.  `forms` holds the ways to spread a kernel over programs, a
type each, and their order; `devices` the properties of each device.
"""

from __future__ import annotations

from fusion.codegen.triton.blocks import Config
from fusion.codegen.triton.target import TritonTarget

__all__ = ["Config", "TritonTarget"]
