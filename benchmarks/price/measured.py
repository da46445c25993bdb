"""Measures the kernels of a program beside their predicted times, on the device at hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusion
from benchmarks.harness import Refused, closed
from benchmarks.price.pace import Probe, between, probed
from benchmarks.price.turns import median_time_alone
from benchmarks.programs import Case
from benchmarks.small_models import Model
from fusion.codegen.price import Price
from fusion.inspect.measurement import Measurement
from fusion.inspect.report import Report, steps_of
from fusion.lowering.ir.expr import Expr, loads
from fusion.lowering.ir.kernel import Fold, Kernel, Prefix, Stmt, Store, statements, values_of
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall

FEW_ROWS = 64
"""Rows or columns of a product below which it is skinny."""

Call = Callable[[], tuple[Tensor, ...]]
Compiler = Callable[[Callable[..., object]], Callable[..., object]]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of a program, with its predicted and measured microseconds.

    `probe`: of the part that bounds it, from about the same moment; None on a GPU.
    """

    program: str
    kernel: str
    kind: str
    predicted: float | None
    measured: float
    bytes: int
    probe: Probe | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time."""
        return self.measured / self.predicted if self.predicted else None


@dataclass(frozen=True, slots=True)
class CallTime:
    """One library call of a program, with its measured microseconds."""

    program: str
    call: str
    measured: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A program as it is measured: `prepare` draws its inputs, and returns a call of it under a compiler."""

    name: str
    prepare: Callable[[str], Callable[[Compiler], Call]]


def of_case(case: Case) -> Subject:
    """Return a case as a subject."""

    def prepare(device: str) -> Callable[[Compiler], Call]:
        inputs = case.make(device)
        return lambda compiler: closed(case, compiler(case.program), inputs)  # type: ignore[arg-type]  # of programs

    return Subject(case.name, prepare)


def of_model(model: Model) -> Subject:
    """Return a model as a subject: its forward pass in the dtype of the device, and gradients if it is trained."""
    return Subject(f"model: {model.name}", lambda device: called(model, device))


def called(model: Model, device: str, dtype: torch.dtype | None = None) -> Callable[[Compiler], Call]:
    """Return calls of a model with weights and inputs that are always the same; by default in the device's dtype."""
    torch.manual_seed(0)
    module = model.make().to(device).train(model.training)
    inputs = model.batch(device)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    module = module.to(dtype)
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}

    def program(**inputs: Tensor) -> object:
        return module(**inputs)

    return lambda compiler: _stepping(compiler(program), module, batch, training=model.training)


def _floats(results: object) -> tuple[Tensor, ...]:
    leaves = pytree.tree_leaves(tuple(results.values()) if isinstance(results, dict) else results)
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _stepping(
    program: Callable[..., object], module: nn.Module, batch: Mapping[str, Tensor], *, training: bool
) -> Call:
    """Return a call of a module: its results, or its first result with the gradients of all parameters."""

    def step() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(training):
            results = _floats(program(**batch))
        if not training:
            return results
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        cotangent = torch.ones_like(results[0])
        # TorchInductor returns zeros where eager returns nothing
        return results[0].detach(), *torch.autograd.grad(results[0], parameters, cotangent, materialize_grads=True)

    return step


def measure(subject: Subject, device: str) -> tuple[list[KernelTime], list[CallTime]]:
    """Run a program once with every step measured.

    Raises:
        Refused: a region runs eagerly.
    """
    torch._dynamo.reset()
    measurement, before = _Described(), probed(device)
    backend = fusion.Backend(fusion.Options.read(options={"graph_cache": False}), measurement)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        subject.prepare(device)(lambda program: torch.compile(program, backend=backend, dynamic=False))()
    after = probed(device)
    kernels: list[KernelTime] = []
    calls: list[CallTime] = []
    for report in backend.reports:
        if report.failure:
            raise Refused(f"Fusion fell back to eager: {report.failure}")
    for report, schedule in measurement.graphs:
        (measured,) = measurement.measured([report])
        launches = [step.kernel for _, step, _ in steps_of(schedule) if isinstance(step, KernelCall)]
        for entry, kernel in zip(measured.kernels, launches, strict=True):
            if entry.measured is not None:
                times = entry.predicted, entry.measured
                moved = entry.bytes_read + entry.bytes_written
                probe = between(before, after, _bound(entry.price))
                kernels.append(KernelTime(subject.name, entry.name, kind_of(kernel), *times, moved, probe))
        calls += [CallTime(subject.name, e.name, e.measured) for e in measured.externs if e.measured is not None]
    return kernels, calls


def _bound(price: Price | None) -> str:
    """Return the part of a price that takes longest, without the launch; the epilogue is arithmetic."""
    if price is None:
        return ""
    parts = {"memory": price.memory, "products": price.products, "scalars": price.scalars + price.epilogue}
    return max(parts, key=parts.__getitem__)


class _Described(Measurement):
    """A measurement that keeps the schedule of each report."""

    def __init__(self) -> None:
        super().__init__(median_time_alone)
        self.graphs: list[tuple[Report, Schedule]] = []

    def compiled(self, report: Report, schedule: Schedule) -> None:
        super().compiled(report, schedule)
        self.graphs.append((report, schedule))


def kind_of(kernel: Kernel) -> str:
    """Return the kind of a kernel, by its statements, whatever the target makes of it."""
    if kernel.beside:
        return "several"
    every = list(statements(kernel.body))
    folds = [stmt for stmt in every if isinstance(stmt, Fold)]
    products = [fold for fold in folds if fold.op == "dot"]
    if products:
        return "chained products" if len(products) > 1 else _product_kind(kernel, products[0])
    if any(isinstance(stmt, Prefix) for stmt in every):
        return "scan"
    if any(isinstance(stmt, Store) and stmt.axes is not None for stmt in every):
        return "scatter"
    if folds:
        return "column fold" if any(_is_along_columns(fold) for fold in folds) else "row fold"
    if any(isinstance(index, Expr) for stmt in every for load in loads(*values_of(stmt)) for index in load.index):
        return "gather"
    return "turned map" if _is_turned(every) else "map"


def _product_kind(kernel: Kernel, product: Fold) -> str:
    """Return the kind of a product by its smaller side."""
    sizes = {axis.symbol: axis.size for axis in kernel.axes}
    sides = [[sizes[axis] for axis in side if axis in sizes] for side in (product.rows, product.columns)]
    smaller = min(math.prod(map(int, side)) if all(size.is_Integer for size in side) else FEW_ROWS for side in sides)
    return "product" if smaller >= FEW_ROWS else "skinny product" if smaller > 1 else "matrix-vector product"


def _is_along_columns(fold: Fold) -> bool:
    """Return whether a fold reads along its axes, and along none of stride 1."""
    read = [offset for offset in _offsets(fold) if offset.free_symbols & {*fold.over}]
    return bool(read) and not any(_fastest(offset) & {*fold.over} for offset in read)


def _offsets(stmt: Stmt) -> Iterator[sympy.Expr]:
    """Yield the positions of a statement's loads that are affine in the axes."""
    for load in loads(*values_of(stmt)):
        yield from (index for index in load.index if not isinstance(index, Expr))


def _is_turned(every: Sequence[Stmt]) -> bool:
    """Return whether a load has another fastest axis than a store."""
    stores = [stmt for stmt in every if isinstance(stmt, Store) and not isinstance(stmt.offset, Expr)]
    written = {axis for stmt in stores if isinstance(stmt.offset, sympy.Expr) for axis in _fastest(stmt.offset)}
    read = [_fastest(offset) for stmt in every for offset in _offsets(stmt)]
    return any(axes and written and axes.isdisjoint(written) for axes in read)


def _fastest(offset: sympy.Expr) -> frozenset[sympy.Basic]:
    """Return the axes along which positions follow each other in memory."""
    return frozenset(axis for axis in offset.free_symbols if offset.coeff(axis) == 1)
