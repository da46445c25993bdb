"""Empties the caches of compilers for a while, so that a first call is a cold one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def empty_caches() -> Iterator[None]:
    """Use empty, temporary cache directories of Fusion and TorchInductor within."""
    variables = ("FUSION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ.get(name) for name in variables}
    with tempfile.TemporaryDirectory(prefix="fusion-cold-", ignore_cleanup_errors=True) as folder:
        try:
            for name in variables:
                os.environ[name] = os.path.join(folder, name.partition("_")[0].lower())
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
