"""Selects the source text of a kernel by the alignment of tensors and by sizes.

Input: an imported source and a function that generates others; output: the source for tensors with or without the
alignment that the kernel declares, and for sizes within or beyond 32 bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from fusion.codegen.triton.launch.load import Generated, load
from fusion.lowering.ir.kernel import Kernel


class Sources:
    """The sources of one kernel, each generated when it is first needed."""

    def __init__(self, generated: Generated, emit: Callable[..., str]) -> None:
        """Take `emit`, which writes a kernel's source without alignments, or with `wide=True` for larger sizes."""
        self._sources, self._emit = {(True, False): generated}, emit
        self._lock = threading.Lock()

    def of(self, aligned: bool, wide: bool = False) -> Generated:
        """Return the source for pointers with or without the declared alignment, and for any sizes or sizes within the
        limit.
        """
        with self._lock:
            if (aligned, wide) not in self._sources:
                declared = self._sources[True, False]
                kernel = declared.kernel if aligned else unaligned(declared.kernel)
                same = not wide and not declared.trusting
                self._sources[aligned, wide] = declared if same else load(kernel, self._emit(kernel, wide=wide))
            return self._sources[aligned, wide]

    def wide(self, aligned: bool, sizes: Sequence[int]) -> bool:
        """Return whether these sizes exceed the limit of the default source."""
        return not self.of(aligned).fits(*sizes)


def unaligned(kernel: Kernel) -> Kernel:
    """Return `kernel`, and the kernels that share its launch, without declared alignments."""
    params = tuple(replace(param, aligned=False) for param in kernel.params)
    others = tuple(map(unaligned, kernel.beside))
    return replace(kernel, params=params, beside=others, then=None if kernel.then is None else unaligned(kernel.then))
