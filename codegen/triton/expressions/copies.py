"""What Gluon calls the copies between memory and the shared memory of a processor: Triton 3.8 named them anew."""

from __future__ import annotations

import triton

_NAMED_ANEW = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)

LOAD = "hopper.tma.async_load" if _NAMED_ANEW else "hopper.tma.async_copy_global_to_shared"
STORE = "hopper.tma.async_store" if _NAMED_ANEW else "hopper.tma.async_copy_shared_to_global"
