"""Identity: what Triton knows itself by, which every key of its cache begins with.

It is a hash of the whole compiler, some 400 MB, and takes 0.3 s, most of it outside of the interpreter lock: a thread
reads ahead while a graph is traced and scheduled.  Builds in several threads wait for it, and do not each read anew.
"""

from __future__ import annotations

import threading
from functools import lru_cache

from triton.runtime.cache import triton_key


@lru_cache(maxsize=1)
def read_ahead() -> threading.Thread:
    """The thread that reads, begun at the first call."""
    thread = threading.Thread(target=triton_key, name="fusion-triton-key", daemon=True)
    thread.start()
    return thread
