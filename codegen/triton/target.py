"""Implements the protocol of a target for Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import sympy
import torch
from triton import knobs

from fusion.codegen.binary import Binary
from fusion.codegen.chained import GENERATED, ChainShape, fastest
from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.scaled import factor_in_place
from fusion.codegen.target import Capabilities, ChainedForm, KernelCandidate, Launcher, Stage
from fusion.codegen.triton.blocks import Config, describe
from fusion.codegen.triton.blocks.dims import dots_of
from fusion.codegen.triton.capabilities import capabilities, chain_speeds, chained_forms
from fusion.codegen.triton.devices import H200, WARP_SPECIALISED, Device, checked, device_at, device_of
from fusion.codegen.triton.fixed_order import refused
from fusion.codegen.triton.forms import Refused, Task, candidates, form_of, single_kernel
from fusion.codegen.triton.forms.last_block import follows_by_tile
from fusion.codegen.triton.forms.side_by_side import alike
from fusion.codegen.triton.forms.skinny import Skinny
from fusion.codegen.triton.forms.traffic import is_packed
from fusion.codegen.triton.forms.warp_groups.groups import run_on
from fusion.codegen.triton.forms.warp_specialised import WarpSpecialised
from fusion.codegen.triton.launch import direct
from fusion.codegen.triton.launch.aot import binary_of, stages
from fusion.codegen.triton.launch.build import build
from fusion.codegen.triton.launch.preparations import start
from fusion.codegen.triton.products.contract import is_widened_to_float64
from fusion.codegen.triton.writer import Writer
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.kernel import Kernel, Role


class TritonTarget:
    """Kernels as Triton source.

    Args:
        arch: the architecture to generate for, such as "sm_90", "sm_80" or "gfx942"; by default the architecture of the
            current device, or of an H200 where there is none.
        numerics: with `tf32`, float32 contractions round their operands to 19 bits.

    Raises:
        BuildError: there is no such architecture.
    """

    name = "triton"
    suffix = "py"

    def __init__(self, arch: str | None = None, numerics: Numerics = DEFAULT) -> None:
        self._arch, self.numerics = None if arch is None else checked(arch), numerics

    @property
    def device(self) -> Device:
        """Return the device for which source is generated."""
        if self._arch is not None:
            return device_of(self._arch)
        return device_at(torch.cuda.current_device()) if torch.cuda.is_available() else H200

    @property
    def identity(self) -> str:
        """Return the architecture, and the device of this machine if there is one."""
        if self._arch is not None or not torch.cuda.is_available():
            return self.device.arch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{self.device.arch} {properties.name} {properties.multi_processor_count} {properties.total_memory}"

    @property
    def capabilities(self) -> Capabilities:
        """Return the supported operations, and their costs on the device."""
        return capabilities(self.device, self.numerics)

    def prepare(self) -> None:
        """Start Triton's one-time preparations, if it compiles in this process."""
        if not knobs.runtime.interpret:
            start()

    def missing_tools(self) -> str:
        """Return why launches on an NVIDIA device go through Triton's stubs; empty if they do not."""
        if knobs.runtime.interpret or not torch.cuda.is_available() or torch.version.hip is not None:
            return ""
        start().driving.join()
        return direct.lacking()

    def emit(self, kernel: Kernel, config: Config | None = None, *, wide: bool = False) -> str:
        """Return the source of `kernel`, in `config` or in the default configuration; `wide`: for any sizes."""
        return emit(kernel, config, device=self.device, numerics=self.numerics, wide=wide)

    def configs(self, kernel: Kernel) -> tuple[Config, ...]:
        """Return configurations worth timing for `kernel` where it is alone in its launch, the default first."""
        return tuple(config for _, config in single_kernel.candidates(Task(kernel, self.device, self.numerics)))

    def refuses(self, kernel: Kernel) -> str:
        """Return why a kernel cannot be generated: its products are not all of matrices that `tl.dot` multiplies, or
        the order of a sum would depend on its other results; empty if it can.
        """
        try:
            if self.numerics.invariant:
                return refused(_task(kernel, self.device, self.numerics).blocked)
            if dots := dots_of(kernel.body):
                _ = _task(kernel, self.device, self.numerics).blocked  # raises if it cannot be blocked
                if any(is_widened_to_float64(dot, kernel.body) for dot in dots):
                    return "a product of float64 reads values of less than 32 bits"
        except Unsupported as refusal:
            return refusal.message
        return ""

    def alternatives(self, kernel: Kernel) -> Sequence[KernelCandidate]:
        """Return one source per form and configuration, the default first, then by predicted time.

        Kernels that share their launch with others have the default only.
        """
        if kernel.beside:
            return (KernelCandidate("default", self.emit(kernel)),)
        sources: dict[str, tuple[str, float]] = {}
        for form, config in candidates(Task(kernel, self.device, self.numerics)):
            sources.setdefault(self.emit(kernel, config), (describe(config), form.relative_time(config)))
        (source, (name, default)), *others = sources.items()
        others.sort(key=lambda pair: pair[1][1])
        return (
            KernelCandidate(name, source, default),
            *(KernelCandidate(name, text, time) for text, (name, time) in others),
        )

    def efficiency(self, kernel: Kernel) -> float:
        """Return the share of the library's speed that a contraction reaches."""
        return _efficiency(kernel, self.device, self.numerics)

    def exposes_epilogue(self, kernel: Kernel) -> bool:
        """Return whether epilogue time adds to GEMM time.  It does through pointers; the efficiency of persistent
        products includes it.
        """
        task = _task(kernel, self.device, self.numerics)
        return bool(task.blocked.dots) and single_kernel.default(task).exposes_epilogue

    def forms(self, kernel: Kernel) -> tuple[ChainedForm, ...]:
        """Return the forms of attention, the faster first: warp-specialised where that is possible; else with the
        reason.
        """
        task = _task(kernel, self.device, self.numerics)
        if len(task.blocked.dots) < 2 or not task.blocked.chained or not run_on(self.device):
            return (ChainedForm(GENERATED),)
        plan = WarpSpecialised.applies(task)
        why = plan.why if isinstance(plan, Refused) else plan.slower
        return (
            (ChainedForm(GENERATED), ChainedForm(WARP_SPECIALISED, why))
            if why
            else (ChainedForm(WARP_SPECIALISED), ChainedForm(GENERATED))
        )

    def chained_share(self, chain: ChainShape, name: str = "") -> float:
        """Return the efficiency of chained products, relative to the library's GEMMs."""
        names = (name,) if name else chained_forms(self.device)
        return fastest(chain_speeds(self.device, self.numerics), names, chain)

    def can_share_launch(self, first: Kernel, second: Kernel) -> bool:
        """Return whether two kernels may share a launch.  They need similar registers and warps, and contractions of
        the same form; a kernel that may return at once stays alone.
        """
        if any(factor_in_place(kernel, kernel.body) is not None for kernel in (first, second)):
            return False
        return not self.numerics.invariant and _alike(first, second, self.device, self.numerics)

    def can_reduce_in_last_block(self, kernel: Kernel, axis: sympy.Symbol) -> bool:
        """Return whether the last program of each tile may sum the split-K parts along `axis`: of products with few
        rows or columns.
        """
        if self.numerics.invariant:
            return False
        grid = kernel.with_role(Role.GRID)
        others = tuple(each for each in grid if each.symbol != axis)
        followed = replace(kernel, then=replace(kernel, axes=others, body=()))
        single, task = _task(kernel, self.device, self.numerics), _task(followed, self.device, self.numerics)
        if not single.blocked.contraction and not is_packed(single.blocked):
            return False  # without split-K it is faster as sums, without matrix units
        awaited = [each for each in grid if each.symbol == axis]
        return follows_by_tile(task.blocked, awaited) and not isinstance(Skinny.applies(task), Refused)

    def build(self, kernel: Kernel, source: str) -> Launcher:
        """Compile `source` for the current device and return a launcher.  Thread-safe.

        Under `TRITON_INTERPRET=1` nothing is compiled, and the launcher takes CPU tensors.

        Raises:
            BuildError: with Triton's own message, or where there is no device.
        """
        return build(kernel, source, self.emit)

    def binary(self, kernel: Kernel, source: str, arch: str | None = None) -> Binary:
        """Return a kernel as cubin, or code object of AMD; needs no device.

        Raises:
            BuildError: Triton cannot compile `source` for `arch`.
        """
        device = device_of(arch) if arch else self.device
        return binary_of(kernel, source, device, strict=self.numerics.strict)

    def stages(self, kernel: Kernel, source: str, arch: str | None = None) -> Iterator[Stage]:
        """Yield TTIR, TTGIR, LLVM IR, then PTX, cubin and SASS, or AMD assembly and code object.  Needs no device.

        Raises:
            BuildError: Triton cannot compile `source` for `arch`.
        """
        return stages(kernel, source, device_of(arch) if arch else self.device)


# Queries of the scheduler are cached: each layer of a model repeats them.


@lru_cache(maxsize=1 << 10)
def _task(kernel: Kernel, device: Device, numerics: Numerics) -> Task:
    """Return the task of a kernel, for decisions only: an equal kernel may have other origins."""
    return Task(kernel, device, numerics)


@lru_cache(maxsize=1 << 10)
def _efficiency(kernel: Kernel, device: Device, numerics: Numerics) -> float:
    return single_kernel.default(_task(kernel, device, numerics)).efficiency()


@lru_cache(maxsize=1 << 12)
def _alike(first: Kernel, second: Kernel, device: Device, numerics: Numerics) -> bool:
    return alike(_task(first, device, numerics), _task(second, device, numerics))


def emit(
    kernel: Kernel,
    config: Config | None = None,
    *,
    device: Device,
    numerics: Numerics = DEFAULT,
    wide: bool = False,
) -> str:
    """Return the source of `kernel` for `device`, in `config` or the default one: a Python file.

    It is self-contained: a docstring with the operations it computes, the device functions it needs, the `@triton.jit`
    kernel, its configuration, its grid, and a `launch` function.  It is imported and compiled as it is, so an edited
    file is an edited kernel.  Equal kernels give equal text (up to the comments on their origin).

    The source is for symbolic sizes with which all indices fit into 32 bits, as its function `fits` decides; it is for
    any sizes if `wide`, or where there is no such limit (`limits`).

    Raises:
        ValueError: no form of the kernel supports `config`.
    """
    task = Task(kernel, device, numerics)
    form, chosen = candidates(task)[0] if config is None else (form_of(task, config), config)
    writer = Writer(device, numerics, within_limit=bool(kernel.sizes) and not wide)
    text = form.emit(chosen, writer)
    if text is None:  # no sizes are within a limit
        text = form.emit(chosen, replace(writer, within_limit=False))
    assert text is not None
    return text
