"""Loads kernels in Triton that another process has compiled, with or without the hardware.

Binaries are put into Triton's own cache, so that a kernel of known sizes is launched without compiling.  The
launcher is the launcher of every other kernel: unaligned tensors, sizes beyond 32 bits, and binaries for sizes that are
multiples of 16 are compiled from the source when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusion.codegen.binary import Loader, Stored
from fusion.codegen.numerics import current
from fusion.codegen.triton.devices import device_at
from fusion.codegen.triton.launch import carried
from fusion.codegen.triton.target import TritonTarget
from fusion.lowering.ir.kernel import Kernel


class _Binaries:
    """Loads binaries that Triton compiled elsewhere (see `fusion.codegen.binary.Loader`)."""

    def lacking(self, needs: Sequence[str]) -> tuple[str, ...]:
        """Return which of `needs` this machine does not have: a kind of devices, an architecture."""
        if not torch.cuda.is_available():
            return tuple(needs)
        kind = "cuda" if torch.version.hip is None else "hip"
        present = {kind, device_at(torch.cuda.current_device()).arch}
        return tuple(need for need in needs if need not in present)

    def load(self, stored: Stored) -> Callable[..., None]:
        """Store a binary in Triton's cache, and return its launcher.

        Raises:
            OSError: Triton's cache cannot be written.
            BuildError: Triton does not launch it.
            ValueError: it is no binary of Triton.
        """
        carried.unpack(stored.carried)
        return self.rebuild(stored)

    def rebuild(self, stored: Stored) -> Callable[..., None]:
        """Compile the source for this machine, or take the cached binary, and return its launcher.

        Raises:
            BuildError: Triton's message.
        """
        kernel = stored.kernel()
        assert isinstance(kernel, Kernel)
        return TritonTarget(None, current(strict=bool(stored.launch["strict"]))).build(kernel, stored.source)


LOADER: Loader = _Binaries()
