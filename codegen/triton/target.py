"""The protocol of a target, for Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import sympy
import torch
from triton import knobs

from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.target import GENERATED, GROUPED, Alternative, AttentionSpeed, Capabilities, Form, Launcher, Stage
from fusion.codegen.triton.architecture import Units
from fusion.codegen.triton.beside import alike
from fusion.codegen.triton.blocks import Blocked, Config, block, describe
from fusion.codegen.triton.blocks.dims import dots_of
from fusion.codegen.triton.choices import candidates, narrow
from fusion.codegen.triton.choices.chains import forms
from fusion.codegen.triton.choices.efficiency import efficiency, speed, waits
from fusion.codegen.triton.choices.vectors import is_packed
from fusion.codegen.triton.emit import emit
from fusion.codegen.triton.launch.present import arch_at
from fusion.codegen.triton.statements.updates import ATOMIC
from fusion.codegen.triton.tail import follows_by_tile, with_room
from fusion.lowering.errors import Unsupported
from fusion.lowering.kernel import Kernel, Role
from fusion.lowering.scalar_ops import FOLD_OPS

# Measured with 2 × 16 heads of 4096 (bfloat16) or 2048 (float32) rows, torch 2.11, triton 3.6; forward in bfloat16,
# with and without a causal mask, with 16384 tokens of 16 heads in lengths of 512 to 16384. Narrow windows take up to
# 1.6 times as long as predicted. The library takes cuDNN's kernel for bfloat16, also with a mask, and the
# memory-efficient one for float32 and for masks of three dimensions. Backward of heads wider than 128 was not
# measured: it is taken to be as fast as of these.
_ATTENTION = {
    ("cudnn", 2): AttentionSpeed(
        plain={64: (0.62, 0.59), 128: (0.87, 0.75), 256: (0.97, 0.75)},
        skipping={64: (0.59, 0.46), 128: (0.78, 0.60), 256: (0.80, 0.60)},
        masked={64: (0.35, 0.34), 128: (0.46, 0.40)},
        begins=160,
    ),
    ("efficient", 2): AttentionSpeed(
        plain={64: (0.30, 0.25)},  # not measured; as a rule below the other two
        skipping={64: (0.30, 0.25)},
        masked={64: (0.06, 0.12), 128: (0.10, 0.16)},
    ),
    ("efficient", 4): AttentionSpeed(
        plain={64: (0.58, 0.68), 128: (0.84, 0.69)},
        skipping={64: (0.48, 0.52), 128: (0.72, 0.58)},
        masked={64: (0.52, 0.63), 128: (0.72, 0.66)},
    ),
    (GENERATED, 2): AttentionSpeed(
        plain={64: (0.64, 0.65), 128: (0.67, 0.69), 256: (0.51, 0.69)},
        skipping={64: (0.64, 0.51), 128: (0.73, 0.57), 256: (0.49, 0.57)},
        masked={64: (0.41, 0.40), 128: (0.47, 0.57)},
        begins=230,
    ),
    (GENERATED, 4): AttentionSpeed(
        plain={64: (0.75, 0.77), 128: (0.47, 0.34)},
        skipping={64: (0.58, 0.48), 128: (0.41, 0.33)},
        masked={64: (0.71, 0.70), 128: (0.45, 0.33)},  # backward not measured
    ),
}
_ATTENTION[GROUPED, 2] = replace(  # kernels of backward, and those that read a mask, have the other form
    _ATTENTION[GENERATED, 2],
    plain={64: (0.71, 0.65), 128: (0.95, 0.69), 256: (1.07, 0.69)},
    skipping={64: (0.66, 0.51), 128: (1.0, 0.57), 256: (1.04, 0.57)},
    begins=300,
)
_ATTENTION["flash", 2] = _ATTENTION["cudnn", 2]  # not measured: taken to be as fast

_H200 = Capabilities(
    fold_ops=frozenset(FOLD_OPS),
    whole_limit=32_768,  # elements of a row: 32 per thread of 32 warps; of 50257, a walk took 0.75 of the time
    window_limit=25,  # else a tile folds it across threads: a pool of 3 by 3 took 13 times as long
    parallelism=2 * 132,  # two programs per multiprocessor
    launch_us=4.0,
    bandwidth=4.3e6,  # a copy, both directions together
    flops=6.7e7,  # float32, outside the matrix units
    matrix_flops=7.5e8,  # bfloat16
    product_us=0.7,  # cuBLAS of 5 by 10 by 5 takes 1.9 to 2.0 on the device, the generated kernel 1.0 to 1.3
    padded=True,
    alignment=16,
    crowding=0.02,
    attention=_ATTENTION,
    scatters=frozenset({"store", *ATOMIC}),
    ordered=False,
)

_TF32_SHARE = {**_H200.matrix_share, 4: 0.5}
"""The library's products of float32 where it may round their operands to 19 bits."""

_TF32_ATTENTION = {
    **_ATTENTION,
    (GENERATED, 4): _ATTENTION[GENERATED, 2].scaled(0.37),
    ("efficient", 4): _ATTENTION["efficient", 4].scaled(_H200.matrix_share[4] / _TF32_SHARE[4]),
}
"""Generated attention runs 2.4 times as fast as with three products; the library's kernel keeps its precision."""


class TritonTarget:
    """Kernels as Triton source.

    Args:
        arch: what to generate for, such as "sm_90", "sm_80" or "gfx942"; by default the current device, or "sm_90"
            where there is none.
        numerics: with `tf32`, float32 contractions round their operands to 19 bits.
    """

    name = "triton"

    def __init__(self, arch: str | None = None, numerics: Numerics = DEFAULT) -> None:
        self._arch, self.numerics = arch, numerics

    @property
    def arch(self) -> str:
        """The architecture that source is generated for."""
        if self._arch is not None:
            return self._arch
        if not torch.cuda.is_available():
            return "sm_90"
        return arch_at(torch.cuda.current_device())

    @property
    def units(self) -> Units:
        """What products are multiplied with, and how."""
        return Units(self.arch, self.numerics.tf32)

    @property
    def identity(self) -> str:
        """The architecture, and the device at hand."""
        if self._arch is not None or not torch.cuda.is_available():
            return self.arch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{self.arch} {properties.name} {properties.multi_processor_count} {properties.total_memory}"

    @property
    def capabilities(self) -> Capabilities:
        """What can be generated, and what it costs on an H200."""
        found = replace(_H200, follows=False) if self.numerics.strict else _H200
        return replace(found, matrix_share=_TF32_SHARE, attention=_TF32_ATTENTION) if self.numerics.tf32 else found

    def prepare(self) -> None:
        """Have Triton begin, if it compiles in this process."""
        from fusion.codegen.triton.launch.beginning import begin

        if not knobs.runtime.interpret:
            begin()

    def lacking(self) -> str:
        """Why launches go through Triton's stubs, where they need not on NVIDIA's devices."""
        from fusion.codegen.triton.launch.beginning import begin
        from fusion.codegen.triton.launch.direct import lacking

        if knobs.runtime.interpret or not torch.cuda.is_available() or torch.version.hip is not None:
            return ""
        begin().driving.join()
        return lacking()

    def emit(self, kernel: Kernel, config: Config | None = None, *, wide: bool = False) -> str:
        """The source of `kernel`, in `config` or in the default configuration; `wide`: for sizes of any size."""
        return emit(kernel, config, arch=self.arch, numerics=self.numerics, wide=wide)

    def configs(self, kernel: Kernel) -> tuple[Config, ...]:
        """Configurations worth timing for `kernel`, the default first."""
        return candidates(block(kernel, self.arch), self.units)

    def refuses(self, kernel: Kernel) -> str:
        """Products in one kernel that are not all of matrices over its dimensions."""
        try:
            if dots_of(kernel.body):
                _blocked(kernel, self.arch)
        except Unsupported as refusal:
            return refusal.message
        return ""

    def alternatives(self, kernel: Kernel) -> Sequence[Alternative]:
        """One for each of `configs`, the default first, then by predicted speed.  Kernels with others in their launch
        have the default only.
        """
        if kernel.beside:
            return (Alternative("default", self.emit(kernel)),)
        blocked = block(kernel, self.arch)
        found: dict[str, tuple[str, float]] = {}
        for config in self.configs(kernel):
            config = with_room(config, kernel)
            found.setdefault(self.emit(kernel, config), (describe(config), speed(blocked, config)))
        (source, (name, default)), *others = found.items()
        others.sort(key=lambda pair: -pair[1][1])
        return (Alternative(name, source, default), *(Alternative(name, text, share) for text, (name, share) in others))

    def efficiency(self, kernel: Kernel) -> float:
        """The share of cuBLAS's speed that a contraction reaches, as measured on an H200."""
        return _efficiency(kernel, self.units)

    def waits(self, kernel: Kernel) -> bool:
        """Through pointers; of products in the persistent form the efficiency says so."""
        return waits(_blocked(kernel, self.arch), self.units)

    def forms(self, kernel: Kernel) -> tuple[Form, ...]:
        """In groups of warps where that is possible and faster; else why it is not."""
        return forms(block(kernel, self.arch), self.arch)

    def packs(self, first: Kernel, second: Kernel) -> bool:
        """Those that need about as many registers and warps, and contractions in the same form."""
        return _alike(first, second, self.units)

    def finishes(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
        """Along the parts of a product with few rows or columns: one program adds up a small tile in no time."""
        grid = kernel.with_role(Role.GRID)
        others = tuple(each for each in grid if each.symbol != axis)
        followed = replace(kernel, then=replace(kernel, axes=others, body=()))
        alone, blocked = _blocked(kernel, self.arch), _blocked(followed, self.arch)
        if not alone.contraction and not is_packed(alone):
            return False  # by itself it is better summed up without matrix units
        added = [each for each in grid if each.symbol == axis]
        return follows_by_tile(blocked, added) and bool(narrow.candidates(blocked))

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """Compile `source` for the current device and return what launches it.  Thread-safe.

        Under `TRITON_INTERPRET=1` nothing is compiled, and the launcher takes CPU tensors.

        Raises:
            BuildError: with Triton's own message, or where there is no device.
        """
        from fusion.codegen.triton.launch.build import build

        return build(kernel, source, self.emit)

    def stages(self, kernel: Kernel, source: str, arch: str | None = None) -> Iterator[Stage]:
        """TTIR, TTGIR, LLVM IR, then PTX and cubin, or AMD assembly and code object.  Needs no device.

        Raises:
            BuildError: Triton cannot compile `source` for `arch`.
        """
        from fusion.codegen.triton.launch.aot import stages

        return stages(kernel, source, arch or self.arch)


# What is asked before kernels are settled is remembered: each layer of a model asks the same.


@lru_cache(maxsize=1 << 10)
def _blocked(kernel: Kernel, arch: str) -> Blocked:
    """A kernel over block dimensions, to be judged by; not to be emitted, as the origins are those of an equal one."""
    return block(kernel, arch)


@lru_cache(maxsize=1 << 10)
def _efficiency(kernel: Kernel, units: Units) -> float:
    return efficiency(_blocked(kernel, units.arch), units)


@lru_cache(maxsize=1 << 12)
def _alike(first: Kernel, second: Kernel, units: Units) -> bool:
    return alike(_blocked(first, units.arch), _blocked(second, units.arch), units)
