"""Default blocks: of short sums, of crowded epilogues, of short rows beside sums of columns, and of columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from fusion.codegen.numerics import DEFAULT
from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.devices import device_of
from fusion.codegen.triton.forms import Refused, Task
from fusion.codegen.triton.forms.pointer_product import PointerProduct
from fusion.compilation.compile import schedule_graph
from fusion.compilation.scheduling import plan
from fusion.dumps.trace import Trace
from fusion.joint import patches
from fusion.joint.patches import multiply_windows
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.ir.kernel import Kernel, Role
from fusion.lowering.lower import lower
from fusion.runner.contexts import Scheduling
from fusion.schedule import grow
from fusion.schedule.kernels import KernelCall
from fusion.schedule.rewrites.inline import inline_cheap_maps
from tests.codegen.kernels.making import BF16
from tests.codegen.kernels.products import matmul

TARGET = TritonTarget("sm_90")


def first(function: Callable[..., object], *shapes: tuple[int, ...], dtypes: Sequence[torch.dtype] = ()) -> Kernel:
    """Return the first kernel of a program on tensors, in bfloat16 unless said, that are never allocated."""
    with FakeTensorMode():
        given = [
            torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes or [BF16] * len(shapes), strict=True)
        ]
        graph = make_fx(function, decomposition_table=decompositions())(*given)
    _, schedule = schedule_graph(graph, TARGET, Trace(None, "forward"))
    return next(step.kernel for step in schedule.steps if isinstance(step, KernelCall))


def product(function: Callable[..., object], *shapes: tuple[int, ...]) -> Kernel:
    """Return the kernel of a product that is not left to the library."""
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=BF16) for shape in shapes]
        graph = make_fx(function, decomposition_table=decompositions())(*given)
    program = inline_cheap_maps(lower(graph))
    schedule = plan(program, grow(program, TARGET.capabilities), Scheduling(None))
    (kernel,) = (step.kernel for step in schedule.steps if isinstance(step, KernelCall))
    return kernel


def through_pointers(kernel: Kernel) -> Config:
    form = PointerProduct.applies(Task(kernel, device_of("sm_90"), DEFAULT))
    assert not isinstance(form, Refused)
    return form.configs()[0]


def size(config: Config) -> tuple[int, int, int, int]:
    return config.block("m"), config.block("n"), config.block("k"), config.num_warps


@pytest.mark.parametrize(
    ("terms", "expected"),
    [(96, (64, 64, 32, 4)), (128, (64, 64, 32, 4)), (192, (128, 64, 32, 4)), (768, (128, 256, 64, 8))],
)
def test_products_of_few_terms_share_a_multiprocessor(terms: int, expected: tuple[int, ...]) -> None:
    assert size(through_pointers(matmul(200704, 768, terms, BF16))) == expected


def test_products_of_few_terms_that_are_small_still_fill_the_device() -> None:
    config = through_pointers(matmul(64, 96, 96, BF16))
    assert config.block("m") < 64, "two programs of 64 × 64 would leave the other multiprocessors idle"


def gradient_of_gelu(dy: Tensor, w: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = torch.ops.aten.gelu_backward(dy @ w, x)
    return gradient


def three_more(dy: Tensor, w: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return dy @ w + a + b + c


def one_more(dy: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return dy @ w + a


@pytest.mark.parametrize(
    ("function", "tiles", "columns"), [(gradient_of_gelu, 1, 128), (three_more, 3, 128), (one_more, 1, 256)]
)
def test_an_epilogue_of_many_tiles_or_much_arithmetic_has_registers(
    function: Callable[..., Tensor], tiles: int, columns: int
) -> None:
    shapes = [(12544, 768), (768, 3072), *[(12544, 3072)] * tiles]
    assert through_pointers(product(function, *shapes)).block("n") == columns


def rows_beside_columns(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a softmax, and of what was added to its operand."""
    gradient = x * (g - (g * x).sum(-1, keepdim=True))
    return gradient, gradient.sum(0)


@pytest.mark.parametrize(("columns", "block", "warps"), [(49, (16, 64), 4), (96, (16, 128), 8)])
def test_a_step_of_short_rows_fits_the_registers(columns: int, block: tuple[int, int], warps: int) -> None:
    (config, *_) = TARGET.configs(first(rows_beside_columns, (200704, columns), (200704, columns)))
    assert (config.block("r"), config.block("q")) == block and config.num_warps == warps


def moments(x: Tensor) -> tuple[Tensor, ...]:
    return torch.var_mean(x.float(), dim=0)


def total(x: Tensor) -> Tensor:
    return x.float().sum(0)


def test_a_second_sum_shortens_the_step() -> None:
    one, two = (TARGET.configs(first(function, (200704, 256)))[0] for function in (total, moments))
    assert two.block("x") * two.block("r") == one.block("x") * one.block("r") // 2
    assert two.block("x") * two.block("r") // (32 * two.num_warps) == 16


def gradients_of_two_norms(g: Tensor, h: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    gradient = torch.where(x > 0, g + h, 0.0)
    return gradient, gradient.float().sum(0), (gradient.float() * x).sum(0), (gradient.float() * y).sum(0)


def gradients_of_a_norm(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    gradient = torch.where(x > 0, g, 0.0)
    return gradient, gradient.float().sum(0), (gradient.float() * x).sum(0)


def test_a_thread_takes_fewer_elements_of_many_tensors() -> None:
    few, many = (
        TARGET.configs(first(function, *[(200704, 512)] * count))[0]
        for function, count in ((gradients_of_a_norm, 2), (gradients_of_two_norms, 4))
    )
    each = [config.block("x") * config.block("r") // (32 * config.num_warps) for config in (few, many)]
    assert each == [8, 4]


def largest_of_each(x: Tensor) -> Tensor:
    return x.amax(1)


@pytest.mark.parametrize(("matrices", "columns"), [(60, 256), (16, 64)])
def test_columns_of_unaligned_rows_are_wide_and_each_thread_takes_few(matrices: int, columns: int) -> None:
    config = TARGET.configs(first(largest_of_each, (matrices, 4096, 4095)))[0]
    assert (config.block("r") * config.block("x"), config.block("x"), config.num_warps) == (1024, columns, 8)


def gradient_of_logits(logits: Tensor, top: Tensor, total: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    gradient = ((logits.float() - top).exp() / total * factor).to(logits.dtype)
    return gradient, gradient.float().sum(0)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 8), (torch.float32, 4)])
def test_columns_of_rows_that_start_at_pairs_of_numbers_have_longer_steps(dtype: torch.dtype, rows: int) -> None:
    """Of 16 bits, a request is for two neighbours."""
    config = TARGET.configs(first(largest_of_each, (60, 4096, 4094), dtypes=[dtype]))[0]
    assert (config.block("r"), config.block("x"), config.num_warps) == (rows, 256, 8)


def test_columns_with_values_of_each_row_have_many_programs() -> None:
    kernel = first(gradient_of_logits, (8192, 30522), (8192, 1), (8192, 1), (8192, 1))
    config = TARGET.configs(kernel)[0]
    assert (config.block("r"), config.block("x"), config.num_warps) == (16, 256, 4)
    (parts,) = (axis.size for axis in kernel.axes if axis.role is Role.GRID and axis.size != 30522)
    assert parts == 8


def windows(x: Tensor, weight: Tensor, padding: int = 0) -> Tensor:
    convolve = F.conv3d if x.ndim == 5 else F.conv2d
    stride = (*[1] * (x.ndim - 4), 2, 2)
    graph = make_fx(lambda x, weight: convolve(x.to(BF16), weight, stride=stride, padding=padding))(x, weight)
    multiply_windows(graph)
    result: Tensor = graph(x, weight)
    return result


def padded_windows(x: Tensor, weight: Tensor) -> Tensor:
    return windows(x, weight, 3)


def bare_windows(x: Tensor, weight: Tensor) -> Tensor:
    return windows(x, weight)


@pytest.mark.parametrize(("channels", "block"), [(256, (128, 128, 32)), (64, (128, 64, 32)), (32, (128, 32, 16))])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_threads_have_whole_padded_windows(
    channels: int, block: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "on_matrix_units", lambda image: True)
    kernel = first(padded_windows, (64, 3, 224, 224), (channels, 3, 7, 7), dtypes=(dtype, BF16))
    config = TARGET.configs(kernel)[0]
    assert tuple(config.block(name) for name in "mnk") == block
    assert (config.num_warps, config.registers) == (4, 168 if channels == 64 else 0)
    text = TARGET.emit(kernel)
    assert text.count("tl.dot(") == 1
    assert f"in tl.range(0, 147, KBLOCK, loop_unroll_factor={config.unrolled}):" in text
    assert config.unrolled * config.block("k") >= 147 > (config.unrolled - 1) * config.block("k")


def test_long_windows_stay_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "on_matrix_units", lambda image: True)
    kernel = first(bare_windows, (4, 3, 16, 112, 112), (32, 3, 3, 7, 7))
    assert "for k0 in range(0, 441, KBLOCK):" in TARGET.emit(kernel)
    assert TARGET.configs(kernel)[0].unrolled == 1


def bags(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).sum(1)


def test_only_padded_windows_shorten_the_step() -> None:
    def joined(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.cat([x.relu(), y], 1) @ w

    def padded(x: Tensor, w: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
        return windows.permute(0, 1, 2, 4, 5, 3).reshape(64 * 28 * 28, 9 * 32) @ w

    kernel = product(joined, (8192, 512), (8192, 512), (1024, 1024))
    assert size(through_pointers(kernel)) == (128, 256, 64, 8)
    kernel = product(padded, (64, 28, 28, 32), (9 * 32, 256))
    assert size(through_pointers(kernel)) == (64, 128, 32, 4)


@pytest.mark.parametrize(("length", "columns"), [(8, 256), (16, 128), (32, 64)])
def test_no_warps_share_the_column_of_a_bag(length: int, columns: int) -> None:
    kernel = first(bags, (8192, length), (100_000, 512), dtypes=(torch.int64, torch.bfloat16))
    config = TARGET.configs(kernel)[0]
    assert (config.block("r"), config.block("x"), config.num_warps) == (length, columns, 1)
