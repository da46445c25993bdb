"""Batch-invariant numerics on a GPU, as far as generated Triton shows them: sums and products are written alike for all
batches.

`tests/interpreter/test_batch_invariance.py` and `tests/gpu/test_batch_invariance_gpu.py` compare the bits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("triton")

from fusion.codegen.numerics import Numerics
from fusion.codegen.target import Target
from fusion.codegen.targets import TARGETS
from fusion.compilation.autograd import aot_backend
from fusion.compilation.compile import schedule_graph
from fusion.compilation.graphs import size_hints
from fusion.dumps.trace import Trace
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Extern
from fusion.runtime import Boxed
from fusion.schedule import Step
from fusion.schedule.kernels import KernelCall
from tests.fusion.test_batch_invariance import PROGRAMS

pytestmark = pytest.mark.usefixtures("without_disassembly")

NUMERICS = Numerics(strict=True, invariant=True)
ROWS = (1, 2, 7, 33, 1024)
MATRIX_UNITS = re.compile(r"wgmma\.mma_async\S*|\bmma\.sync\S*")


def target_of(arch: str = "sm_90", numerics: Numerics = NUMERICS) -> Target:
    return TARGETS["triton"](arch, numerics)


def steps_of(program: Callable[..., object], target: Target, *inputs: Tensor) -> list[Step]:
    """The steps of a program without gradients, whose first input may have a symbolic number of rows."""
    result: list[Step] = []

    def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
        _, schedule = schedule_graph(graph, target, Trace(None, label), size_hints(graph))
        result.extend(schedule.steps)

        def run(args: list[object]) -> tuple[object, ...]:
            given = tuple(args)
            args.clear()
            return tuple(graph(*given))

        return run

    torch._dynamo.reset()
    backend = aot_backend(compile_one, lambda device: target.capabilities, exact=True)
    with torch.no_grad():
        torch.compile(program, backend=backend)(*inputs)
    return result


def kernels(steps: Sequence[Step]) -> list[Kernel]:
    return [step.kernel for step in steps if isinstance(step, KernelCall)]


def orders(steps: Sequence[Step], target: Target) -> set[tuple[str, ...]]:
    """What decides the order of additions: of each sum, and of each product."""
    found: set[tuple[str, ...]] = set()
    for kernel in kernels(steps):
        source = target.emit(kernel)
        text = source[source.index(f"def {kernel.name}(") : source.index("CONFIG = ")]
        constants = {key: int(value) for key, value in re.findall(r'"(\w+)": (\d+)', source)}
        assert not re.search(r"tl\.sum\((?!tl\.reshape\(_(sum|product)_in_pairs)", text)  # but of a single element
        looped = "for r0 in" in text
        if "_in_pairs(" in text:
            found.add(("row", str(constants["RBLOCK"]), "loop" if looped else "whole"))
        if "tl.dot(" in text:
            assert constants["MBLOCK"] % 64 == 0 and constants["num_warps"] == 4
            found.add(("product", *(f"{name}={constants[name]}" for name in ("NBLOCK", "KBLOCK", "num_warps"))))
        assert "atomic" not in text
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_and_products_are_written_alike_for_all_batches(name: str, dtype: torch.dtype) -> None:
    program, shape = PROGRAMS[name]
    target = target_of()
    batches = {str(rows): torch.empty(rows, *shape, dtype=dtype) for rows in ROWS}
    batches["symbolic"] = torch.empty(7, *shape, dtype=dtype)
    torch._dynamo.mark_dynamic(batches["symbolic"], 0)
    found = {}
    for rows, batch in batches.items():
        steps = steps_of(program, target, batch)
        externs = {str(step.name) for step in steps if isinstance(step, Extern) and not step.is_view}
        assert externs == ({"aten.cumsum.default"} if name == "scan" else set())
        found[rows] = orders(steps, target)
    assert found["1"] or name == "scan"
    assert all(each == found["1"] for each in found.values()), found


COLUMNS: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
    "short columns": (lambda x: x.sum(1), (40, 72)),
    "columns held whole": (lambda x: x.softmax(1), (3000, 24)),
    "columns in a loop": (lambda x: (x.mean(1), x.var(1)), (5000, 40)),
    "long columns": (lambda x: x.sum(1), (70_000, 24)),
    "products of columns": (lambda x: (x * 0.1 + 1).prod(1), (700, 24)),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_summed_as_rows_are(name: str) -> None:
    program, shape = COLUMNS[name]
    target = target_of()
    found = [orders(steps_of(program, target, torch.empty(rows, *shape)), target) for rows in (1, 33)]
    rows = orders(steps_of(lambda x: program(x.mT), target, torch.empty(7, *reversed(shape))), target)
    assert found[0] == found[1] == rows


def test_a_fold_visits_its_points_in_its_own_order_beside_others() -> None:
    def both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp().sum((1, 2)), x.transpose(1, 2).sin().flatten(1).sum(1)

    x = torch.empty(3000, 20, 30)
    for numerics, together in ((Numerics(strict=True), True), (NUMERICS, False)):
        names = [kernel.name for kernel in kernels(steps_of(both_ways, target_of(numerics=numerics), x))]
        assert any("exp" in name and "sin" in name for name in names) == together


def test_nothing_depends_on_the_number_of_multiprocessors() -> None:
    """A100 and H100 differ in their instructions for products; sums are written alike."""
    for name in ("softmax", "long log_softmax", "sum in parts", "layer norm and gelu", "sums along both"):
        program, shape = PROGRAMS[name]
        found = [orders(steps_of(program, target, torch.empty(33, *shape)), target) for target in TARGETS_OF_SUMS]
        assert found[0] == found[1] == found[2], name


TARGETS_OF_SUMS = (target_of("sm_80"), target_of("sm_90"), target_of("sm_86"))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_all_batches_are_multiplied_by_one_instruction(arch: str, tf32: bool) -> None:
    target = target_of(arch, Numerics(strict=True, tf32=tf32, invariant=True))
    for name in ("odd linear", "norm and linear", "product of batches"):
        program, shape = PROGRAMS[name]
        for dtype in (torch.float32, torch.bfloat16):
            instructions = set()
            for rows in (1, 4096):
                for kernel in kernels(steps_of(program, target, torch.empty(rows, *shape, dtype=dtype))):
                    source = target.emit(kernel)
                    if "tl.dot(" in source:
                        ptx = str(dict(target.stages(kernel, source))["ptx"])
                        instructions |= set(MATRIX_UNITS.findall(ptx))
            (instruction,) = instructions
            assert instruction.startswith("wgmma" if arch == "sm_90" else "mma.sync")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets")
@pytest.mark.parametrize("name", ["columns held whole", "columns in a loop", "long columns"])
def test_columns_compile(name: str) -> None:
    program, shape = COLUMNS[name]
    target = target_of()
    for kernel in kernels(steps_of(program, target, torch.empty(33, *shape))):
        assert dict(target.stages(kernel, target.emit(kernel)))["cubin"]


def test_products_are_generated_without_other_folds() -> None:
    def gated(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.silu(x @ v) * (x @ w)

    given = torch.empty(512, 256), torch.empty(256, 256), torch.empty(256, 256)
    sources = [target_of().emit(kernel) for kernel in kernels(steps_of(gated, target_of(), *given))]
    assert sorted(source.count("tl.dot(") for source in sources)[-2:] == [1, 1]


def test_nothing_is_timed() -> None:
    target = target_of()
    for name in ("softmax", "linear", "sums along both"):
        program, shape = PROGRAMS[name]
        for kernel in kernels(steps_of(program, target, torch.empty(33, *shape))):
            assert [each.source for each in target.alternatives(kernel)] == [target.emit(kernel)]
