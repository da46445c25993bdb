"""Compares the results of a kernel on drawn inputs with the evaluator of its block program.

Input: a kernel, a launcher of it and tensors; output: the error of each written tensor against float64, and whether the
kernel may be right.  The evaluator runs twice: in float64, and in the dtypes of the kernel with its roundings, which
says how much of the error rounding explains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusion.codegen.target import Launcher
from fusion.dumps.inputs import Draw, attempts
from fusion.inspect.accuracy import UNWRITTEN, copied, distance, floor_of, is_close
from fusion.lowering.errors import CheckFailed, Unsupported, VerifyError
from fusion.lowering.interpret import run_kernel
from fusion.lowering.interpret.evaluate import flat_view
from fusion.lowering.ir.kernel import Kernel, only_stored


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """The error of one written tensor.

    Attributes:
        name: the parameter.
        error: relative to float64, by norms; of integers and booleans, the share of wrong elements.
        rounding: the same of the evaluator in the kernel's dtypes.
        largest: the largest absolute error of one element.
        outside: elements that the kernel wrote, and should not have.
        is_right: whether rounding and the order of sums explain the error.
    """

    name: str
    error: float
    rounding: float
    largest: float
    outside: int
    is_right: bool

    def __str__(self) -> str:
        head = "right" if self.is_right else "WRONG"
        text = f"{head}: {self.name}: error {self.error:.1e} against float64, by its dtypes {self.rounding:.1e}"
        text += f"; at most {self.largest:.1e}"
        return f"{text}; {self.outside} elements were written that should not be" if self.outside else text


@dataclass(frozen=True, slots=True)
class Case:
    """Tensors to launch a kernel on, with the same after the evaluator has run it.

    Attributes:
        tensors: one for each parameter.
        sizes: one for each size of the kernel.
        rounded: the tensors after a run in the dtypes of the kernel.
        exact: the tensors after a run in float64.
    """

    kernel: Kernel
    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    rounded: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        inputs: Callable[[Draw], Sequence[torch.Tensor]],
        sizes: Sequence[int],
        device: torch.device,
    ) -> Case:
        """Draw tensors on which every access of the kernel is in bounds, and evaluate it.

        Raises:
            Unsupported: the evaluator refuses the kernel on all tensors that were tried.
        """
        refusal: Exception | None = None
        dims = {size for tensor in inputs(Draw(torch.device("cpu"))) for size in tensor.shape}
        for draw in attempts(device, dims):
            tensors = tuple(inputs(draw))
            try:
                return cls(kernel, tensors, tuple(sizes), *_evaluated(kernel, tensors, sizes))
            except (VerifyError, CheckFailed) as error:
                refusal = error
            if draw.is_last:
                break
        raise Unsupported(f"{kernel.name} accepts no inputs that were drawn: {refusal}")

    def run(self, launch: Launcher) -> list[ComparedTensor]:
        """Launch the kernel on copies of the tensors, and compare its results.

        Raises:
            Exception: whatever the launch raises.
        """
        tensors = [copied(tensor, tensor.dtype) for tensor in self.tensors]
        launch(*tensors, *self.sizes)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        each = zip(self.kernel.params, self.tensors, tensors, self.rounded, self.exact, strict=True)
        return [self._compared(param.name, *rest) for param, *rest in each if param.written or not _same(*rest[:2])]

    def _compared(
        self, name: str, before: torch.Tensor, ours: torch.Tensor, rounded: torch.Tensor, exact: torch.Tensor
    ) -> ComparedTensor:
        before, ours, rounded, exact = map(flat_view, (before, ours, rounded, exact))
        stored = exact != UNWRITTEN if exact.is_floating_point() else ~_equal(before, rounded)
        outside = int((~_equal(ours, before) & ~stored).sum())
        ours, rounded, exact = ours[stored], rounded[stored], exact[stored]
        is_right, error, explained = is_close(ours, rounded, exact, floor_of(self.kernel, ours.dtype))
        return ComparedTensor(name, error, explained, distance(ours, exact)[1], outside, is_right and not outside)


def _evaluated(
    kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return copies of tensors after a run of the evaluator, in their dtypes and in float64."""
    rounded = tuple(copied(tensor, tensor.dtype) for tensor in tensors)
    exact = tuple(copied(each, torch.float64 if each.is_floating_point() else each.dtype) for each in tensors)
    unread = only_stored(kernel)
    for param, tensor in zip(kernel.params, exact, strict=True):
        if param.name in unread and tensor.is_floating_point():
            flat_view(tensor).fill_(UNWRITTEN)
    run_kernel(kernel, rounded, sizes)
    run_kernel(kernel, exact, sizes, exact=False)
    return rounded, exact


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    return bool(_equal(flat_view(before), flat_view(after)).all())


def _equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return where two tensors hold the same number, or both NaN."""
    return (left == right) | (left.isnan() & right.isnan()) if left.is_floating_point() else left == right


__all__ = ["Case", "ComparedTensor", "is_close"]
