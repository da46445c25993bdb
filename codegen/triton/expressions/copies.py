"""Gluon's names for the copies between global and shared memory: Triton 3.8 renamed them."""

from __future__ import annotations

import triton

_RENAMED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)

LOAD = "hopper.tma.async_load" if _RENAMED else "hopper.tma.async_copy_global_to_shared"
STORE = "hopper.tma.async_store" if _RENAMED else "hopper.tma.async_copy_shared_to_global"
