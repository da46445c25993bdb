"""Loads kernels in C that another process has compiled."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial

from fusion.codegen.binary import Loader, Stored
from fusion.codegen.c.build import bind_openmp, build_object
from fusion.codegen.c.calls import launcher_of
from fusion.codegen.c.processor import features


class _Objects:
    """Loads shared objects, and builds them again where there is a C compiler (see `fusion.codegen.binary.Loader`)."""

    def lacking(self, needs: Sequence[str]) -> tuple[str, ...]:
        """Return the `needs` that this machine lacks: architecture, operating system, features of the CPU."""
        present = {platform.machine(), platform.system(), *features()}
        return tuple(need for need in needs if need not in present)

    def load(self, stored: Stored) -> Callable[..., None]:
        """Load an object, and return its launcher.

        Raises:
            OSError, AttributeError: this machine cannot load it.
        """
        bind_openmp()
        return launcher_of(stored.content, stored.callee, stored.failed, stored.source)

    def rebuild(self, stored: Stored) -> Callable[..., None]:
        """Compile the source for this machine, or take the object from the cache, and return its launcher.

        Raises:
            BuildError: no compiler, or its message.
        """
        load = partial(launcher_of, callee=stored.callee, failed=stored.failed, source=stored.source)
        return build_object(stored.source, stored.callee.name, load)


LOADER: Loader = _Objects()
