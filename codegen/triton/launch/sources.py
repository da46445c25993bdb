"""Sources: which text of a kernel serves which tensors and sizes.

What enters is an imported source and what generates others; what leaves is the source for tensors that are or are not
aligned as the kernel promises, and for sizes within or beyond what 32 bits can count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from fusion.codegen.triton.launch.load import Generated, load
from fusion.lowering.kernel import Kernel


class Sources:
    """The sources of one kernel, each generated when it is first needed."""

    def __init__(self, generated: Generated, emit: Callable[..., str]) -> None:
        """`emit` makes the source of a kernel without promises, and, with `wide=True`, for sizes beyond the limit."""
        self._found, self._emit = {(True, False): generated}, emit
        self._lock = threading.Lock()

    def of(self, aligned: bool, wide: bool = False) -> Generated:
        """What is compiled for pointers that are or are not as promised, and for any sizes or for most."""
        with self._lock:
            if (aligned, wide) not in self._found:
                promised = self._found[True, False]
                kernel = promised.kernel if aligned else unaligned(promised.kernel)
                same = not wide and not promised.trusting
                self._found[aligned, wide] = promised if same else load(kernel, self._emit(kernel, wide=wide))
            return self._found[aligned, wide]

    def wide(self, aligned: bool, sizes: Sequence[int]) -> bool:
        """Are these sizes beyond what the kernel is generated for as a rule?"""
        return not self.of(aligned).fits(*sizes)


def unaligned(kernel: Kernel) -> Kernel:
    """`kernel`, and what shares its launch, without promises on pointers."""
    params = tuple(replace(param, aligned=False) for param in kernel.params)
    others = tuple(map(unaligned, kernel.beside))
    return replace(kernel, params=params, beside=others, then=None if kernel.then is None else unaligned(kernel.then))
