"""Products in a loop: each is a GEMM of tiles, or is computed before the loop; none makes its region fail."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.triton import TritonTarget
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.ir.expr import loads
from fusion.lowering.ir.kernel import Fold, Kernel, statements
from fusion.schedule import Schedule
from fusion.schedule import chained as chains
from tests.fusion.agreement import assert_as_eager

GPU = TritonTarget("sm_90")


def relative(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Attention to positions by how far away they are: products with a table, moved along by padding each row."""
    count, length, _ = q.shape
    result = F.pad(q @ table.T, (0, 1)).flatten(1)
    result = F.pad(result, (0, length - 1)).view(count, length + 1, 2 * length - 1)[:, :length, length - 1 :]
    return (q @ k.transpose(-1, -2) + result).softmax(-1) @ v


def skewed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The same with a table of even length: each row is moved along without padding, and reads the products alone."""
    count, length, _ = q.shape
    result = (q @ table.T).flatten(1)[:, length - 1 :][:, : length * (2 * length - 1)]
    return (q @ k.transpose(-1, -2) + result.view(count, length, 2 * length - 1)[..., :length]).softmax(-1) @ v


def by_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Scores in an image: the addend of a row of keys is a product with another matrix for each row of queries."""
    count, points, width = q.shape
    side = table.shape[0]
    added = torch.einsum("brcd,rkd->brck", q.view(count, side, side, width), table)
    return (q @ k.transpose(-1, -2) + added.reshape(count, points, -1).repeat_interleave(side, -1)).softmax(-1) @ v


def by_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, each: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Scores to which a number of each key is added: per batch, a product with a vector."""
    return (q @ k.transpose(-1, -2) + (each @ table.T)[:, None]).softmax(-1) @ v


def windows(x: torch.Tensor, projection: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Attention in short windows: three heads of 32, which one narrow layer projects."""
    count, points, _ = x.shape
    q, k, v = (x @ projection).view(count, points, 3, 3, 32).permute(2, 0, 3, 1, 4)
    return (q @ k.transpose(-1, -2) * 32**-0.5 + added).softmax(-1) @ v


def scheduled(function: object, *given: torch.Tensor) -> Schedule:
    """Return the schedule of a program for a GPU."""
    graph = make_fx(function, tracing_mode="fake", decomposition_table=decompositions())(*given)
    return schedule_graph(graph, GPU, Trace(None, "graph"))[1]


def products(kernel: Kernel) -> list[Fold]:
    return [stmt for stmt in statements(kernel.body) if isinstance(stmt, Fold) and stmt.op == "dot"]


def operands(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(number)) for number, shape in enumerate(shapes)]


RELATIVE = ((64, 64, 16), (64, 64, 16), (64, 64, 16), (127, 16))
SKEWED = (*RELATIVE[:3], (128, 16))
BY_ROWS = ((64, 256, 4), (64, 256, 4), (64, 256, 4), (16, 16, 4))
BY_KEYS = ((256, 64, 8), (256, 1024, 8), (256, 1024, 8), (256, 8), (1024, 8))


@pytest.mark.parametrize(
    ("function", "shapes"), [(relative, RELATIVE), (skewed, SKEWED), (by_rows, BY_ROWS), (by_keys, BY_KEYS)]
)
def test_a_product_that_is_no_gemm_in_the_loop_is_computed_before_it(
    function: object, shapes: tuple[tuple[int, ...], ...]
) -> None:
    kernels = [call.kernel for call in scheduled(function, *operands(*shapes)).launches()]
    counts = sorted(len(products(kernel)) for kernel in kernels)
    assert counts[-2:] == [1, 2], counts  # with the table; with the keys and the values
    assert all("tl.dot" in GPU.emit(kernel) for kernel in kernels if products(kernel))


def test_scores_of_short_windows_stay_in_their_kernel() -> None:
    """They have fewer elements than queries and keys, which are views of a product that is larger than its operands."""
    shapes = (512, 49, 96), (96, 288), (3, 49, 49)
    kernels = [call.kernel for call in scheduled(windows, *operands(*shapes)).launches()]
    assert [len(products(kernel)) for kernel in kernels][-1] == 2 and len(kernels) <= 2
    given = operands((20, 49, 96), *shapes[1:])
    fused = fusion.fuse(windows, options={"target": "c", "strict": True})
    assert_as_eager(fused(*given), windows(*given), windows(*(x.double() for x in given)))


@pytest.mark.parametrize(("width", "chained"), [(64, True), (192, False)])
def test_the_inner_layer_of_a_perceptron_is_stored_where_its_trip_is_shorter(width: int, chained: bool) -> None:
    """Its bias and its GELU join the first product: only their result would make the trip."""

    def perceptron(x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ up + bias) @ down

    shapes = (25088, width), (width, 4 * width), (4 * width,), (4 * width, width)
    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    counts = [len(products(call.kernel)) for call in scheduled(perceptron, *given).launches()]
    assert (2 in counts) is chained


def test_keys_are_rotated_before_the_loop_over_them() -> None:
    """Each block of keys would be five in it, for each block of queries."""

    def half(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([-x[..., 32:], x[..., :32]], -1)

    def rotary(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k = (x * cos + half(x) * sin for x in (q, k))
        return (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v

    shapes = (128, 1024, 64), (128, 1024, 64), (128, 1024, 64), (1024, 64), (1024, 64)
    kernels = [
        call.kernel for call in scheduled(rotary, *(torch.empty(s, dtype=torch.bfloat16) for s in shapes)).launches()
    ]
    assert [len(products(kernel)) for kernel in kernels] == [0, 2]
    _, keys = products(kernels[1])[0].args
    assert len(set(loads(keys))) == 1


def test_relative_positions_have_the_values_of_eager() -> None:
    given = operands(*RELATIVE)
    fused = fusion.fuse(relative, options={"target": "c", "strict": True})
    assert_as_eager(fused(*given), relative(*given), relative(*(x.double() for x in given)))


@pytest.mark.parametrize(("function", "shapes"), [(skewed, SKEWED), (by_keys, BY_KEYS)])
def test_operands_that_are_more_than_matrices_are_refused_before_they_are_written(
    monkeypatch: pytest.MonkeyPatch, function: object, shapes: tuple[tuple[int, ...], ...]
) -> None:
    monkeypatch.setattr(chains, "products_of_vectors", lambda dependences, result: frozenset())
    schedule = scheduled(function, *operands(*shapes))
    assert any("more than a matrix" in refusal.reason for refusal in schedule.refusals)
    assert all(GPU.emit(call.kernel) for call in schedule.launches())


def of_three(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """In one loop, a program would hold rows of three products."""
    first, second, third = (rows @ keys[number].T for number, rows in enumerate((x, y, z)))
    return (first[:, None, None] + second[None, :, None] + third[None, None]).logsumexp(-1)


def test_a_chain_that_cannot_be_generated_is_split() -> None:
    """Its nodes have kernels that can be generated, and the refusals give the reason."""
    schedule = scheduled(of_three, *operands((8, 4), (8, 4), (8, 4), (3, 32768, 4)))
    kernels = [call.kernel for call in schedule.launches()]
    assert len(kernels) > 1 and all(GPU.emit(kernel) for kernel in kernels)
    assert any("spread other axes over programs" in refusal.reason for refusal in schedule.refusals)


def test_a_split_chain_agrees_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(target: ReferenceTarget, kernel: Kernel) -> str:
        return "one product to a kernel" if len(products(kernel)) > 1 else ""

    monkeypatch.setattr(ReferenceTarget, "refuses", refuses)
    given = operands(*RELATIVE)
    explanation = fusion.explain(relative, options={"target": "reference", "strict": True})(*given)
    assert "one product to a kernel" in {refusal.reason for refusal in explanation.refusals}
    fused = fusion.fuse(relative, options={"target": "reference", "strict": True})
    assert_as_eager(fused(*given), relative(*given), relative(*(x.double() for x in given)))


def test_a_chain_of_operands_whose_speed_was_not_measured_is_priced() -> None:
    given = [each.double() for each in operands(*((1, 520, 4),) * 3)]
    program = scheduled(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v, *given)
    assert [len(products(call.kernel)) for call in program.launches()] == [2]
