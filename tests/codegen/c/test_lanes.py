"""Loops that GCC is expected to vectorise, by its own report."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.codegen.c.compiler import find_compiler
from fusion.codegen.c.text.library import vector_functions


def reported_optimizations(source: str, what: str) -> str:
    """Return the compiler's messages about optimizations named `what` in `source`."""
    wanted = (f"-fopt-info-{what}-optimized", "-S", "-o", "/dev/null")
    compiler = find_compiler()
    command = [*compiler.command, *compiler.flags(), *wanted, "-x", "c", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stderr


def loops_in_lanes(source: str) -> int:
    """Return the number of loops of `source` that the compiler vectorises."""
    return len(set(re.findall(r":(\d+):\d+: optimized: loop vectorized", reported_optimizations(source, "vec"))))


def kernels_of(f: Callable[..., object], *args: torch.Tensor) -> list[str]:
    """Return the C sources of the kernels of `f`."""
    fused = fusion.fuse(f, options={"target": "c", "strict": True})
    fused(*args)
    return [result.source for graph in fusion.report(fused).graphs for result in graph.kernels]


pytestmark = pytest.mark.skipif("Free Software" not in find_compiler().version, reason="GCC says it")


def test_a_mask_that_is_stored_and_multiplied_with():
    """The kernel of dropout in training."""
    (source,) = kernels_of(lambda x: F.dropout(x, 0.1), torch.randn(1 << 16, requires_grad=True))
    assert loops_in_lanes(source) == 1


def test_a_causal_mask_that_is_added():
    """GCC must not split a loop at the end of a condition's range: its second half would not be vectorised."""

    def masked(q, k):
        at = torch.arange(400)
        return (q @ k.mT + torch.where(at <= at[:, None], 0.0, torch.finfo(q.dtype).min)).softmax(-1) @ k

    (source,) = kernels_of(masked, *torch.randn(2, 4, 400, 16))
    assert "<=" in source and "loop split" not in reported_optimizations(source, "loop")


def test_a_sine_and_a_cosine_of_the_same_number():
    """As for the angles of a rotary embedding: GCC would merge both into one call, which has no vector form."""
    if not {"sinf", "cosf"} <= vector_functions():
        pytest.skip("libmvec has none here")
    (source,) = kernels_of(lambda x: x.cos() * 2 + x.sin(), torch.randn(1 << 16))
    assert loops_in_lanes(source) == 1


def test_groups_of_few_contiguous_channels():
    """Lanes run along the groups: along the channels of one, each took three times as long.  Means are there before."""
    x = torch.randn(4, 64, 20, 20).contiguous(memory_format=torch.channels_last)
    (source,) = kernels_of(lambda x: F.group_norm(x, 32), x)
    inner = r"#pragma omp simd\n\s*for \(int64_t i1 .*\n(?:.*;\n)*\s*for \(int64_t r1 = 0; r1 < 2; r1\+\+\)"
    assert len(re.findall(inner, source)) == 3
    assert all(line.strip().startswith("kept") for line in source.splitlines() if " / 800.0f" in line)
    assert loops_in_lanes(source) >= 5


def test_a_row_of_strided_elements_is_read_once():
    """Each lane loads its element of the other tensor on its own, in each of three loops: it took twice as long."""

    def program(x, y):
        return F.layer_norm(x + y.transpose(1, 2), (64,))

    (source,) = kernels_of(program, torch.randn(2, 40, 64), torch.randn(2, 64, 40))
    inside = [line for line in source.splitlines() if "in1[" in line and "r0" in line]
    assert len(inside) == 1
    assert source.count("_Alignas(64) float kept") == 1
    (contiguous,) = kernels_of(program, torch.randn(2, 40, 64), torch.randn(2, 40, 64).transpose(1, 2))
    assert "kept" not in contiguous


def test_a_window_has_lanes_along_the_rows_it_slides_over():
    """Both axes are contiguous; five lanes along the window's took eight times as long."""
    (source,) = kernels_of(lambda x: F.avg_pool2d(x**2, 5, 1, 2), torch.randn(2, 8, 56, 56))
    assert re.search(r"#pragma omp simd\n\s*for \(int64_t i2 = first", source)
    assert loops_in_lanes(source) >= 3


@pytest.mark.skipif(find_compiler().machine != "x86_64", reason="its instructions are counted")
def test_a_maximum_that_keeps_nan_waits_for_one_instruction():
    """With two comparisons and a branch for the remainder of a row, a pool took 2.3 times as long."""
    (source,) = kernels_of(lambda x: F.max_pool2d(x, 3, 2, 1), torch.randn(2, 8, 56, 56))
    compiler = find_compiler()
    command = [*compiler.command, *compiler.flags("x86-64-v3"), "-S", "-o", "-", "-x", "c", "-"]
    assembly = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    assert "vmaxps" in assembly and "vmaxss" in assembly
    assert "comiss" not in assembly.replace("vucomiss", "")  # those left test for NaN


def test_candidates_of_a_row_are_compared_in_lanes():
    """One after the other they took longer than a row of 128 numbers."""
    (source,) = kernels_of(lambda x: x.argmax(-1), torch.randn(40, 128))
    assert "argmax_of_float(argmax0_best, argmax0_shares, 64)" in source
    assert loops_in_lanes(source) >= 4


MOVES = {
    "rolled": (lambda x: x.roll(3, 1), 2),
    "reflected": (lambda x: F.pad(x, (2, 3), mode="reflect"), 3),
    "clamped": (lambda x: F.pad(x[None], (2, 3), mode="replicate")[0], 3),
    "rolled and padded": (lambda x: F.pad(x.roll(-5, 1), (4, 0)), 3),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_loop_is_cut_where_an_index_turns_or_wraps(name):
    """Each piece reads neighbours: no remainder, no absolute value, no mask, no gather."""
    f, pieces = MOVES[name]
    x = torch.randn(40, 200)
    torch.testing.assert_close(fusion.fuse(f, options={"target": "c", "strict": True})(x), f(x), rtol=0, atol=0)
    (source,) = kernels_of(f, x)
    body = source[source.index(") {") :]
    assert body.count("#pragma omp simd") == pieces
    assert not re.search(r"%|abs_|\?|imin|imax", body)


PAIRS = {
    "stacked": lambda x, y: torch.stack((x + y, x - y), -1),
    "unpacked": lambda x, y: torch.stack((x.int() & 15, x.int() >> 4, y.int() & 3), -1).flatten(1),
    "with what both share": lambda x, y: torch.stack((x, y), -1) * x.exp()[..., None],
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_last_axis_of_two_or_three_points_is_unrolled(name):
    """Lanes run along the axis before it; what its points have in common is computed once."""
    x, y = torch.randn(2, 37, 100) * 40
    f = PAIRS[name]
    torch.testing.assert_close(fusion.fuse(f, options={"target": "c", "strict": True})(x, y), f(x, y))
    (source,) = kernels_of(f, x, y)
    assert loops_in_lanes(source) == 1
    assert len(re.findall(r"out0\[.*\] = ", source)) == (3 if name == "unpacked" else 2)
    assert source.count("in0[") <= 1 and source.count("exp_float(in0_0)") <= 1


def unpacked_product(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return x · wᵀ of 4-bit weights, two to a byte, with a scale for every 96 of a row."""
    numbers = torch.stack((packed & 15, packed >> 4), -1).view(len(packed), -1, 96).to(x.dtype) - 8.0
    return x @ (numbers * scale[..., None]).view(len(packed), -1).t()


def test_a_vector_times_unpacked_weights_is_one_loop_over_bytes():
    """Halves of a byte are folded at once, and the scale of a group is loaded once for it: nothing is gathered."""
    x, packed, scale = torch.randn(1, 384), torch.randint(0, 256, (480, 192), dtype=torch.uint8), torch.rand(480, 4)
    fused = fusion.fuse(unpacked_product, options={"target": "c", "strict": True})
    exact = unpacked_product(x.double(), packed, scale.double())
    torch.testing.assert_close(fused(x, packed, scale).double(), exact, rtol=1e-5, atol=1e-4)
    (source,) = kernels_of(unpacked_product, x, packed, scale)
    assert loops_in_lanes(source) >= 1 and not re.search(r"/ ?(48|96)|\?", source[source.index("omp parallel for") :])
    assert len(re.findall(r"= in2\[", source)) == 1 and "r2" not in source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shapes", [((1, 300), (300, 45)), ((45, 300), (300, 1)), ((3, 1, 40), (3, 40, 70))], ids=str)
def test_a_product_with_a_vector_is_a_reduction(dtype, shapes):
    """Packed into tiles, each element of the matrix would be read twice."""
    left, right = (torch.randn(shape).to(dtype) for shape in shapes)
    f = lambda a, b: (a @ b).relu()  # noqa: E731
    exact = f(left.double(), right.double())
    error = (fusion.fuse(f, options={"target": "c", "strict": True})(left, right).double() - exact).abs().max()
    assert error <= 2 * (f(left, right).double() - exact).abs().max() + 1e-6
    (source,) = kernels_of(f, left, right)
    assert "pack_" not in source and "mm" in source and loops_in_lanes(source) >= 1


@pytest.mark.parametrize("width", [64, 48, 20])
def test_sums_over_rows_of_heads_that_are_concatenated(width: int) -> None:
    """Lanes are the columns of one head: quotients and remainders of a column would be gathered."""

    def joined(*parts):
        rows = torch.cat([part.transpose(1, 2).reshape(-1, 3 * width) for part in parts], -1)
        return rows.sum(0), rows

    parts = torch.randn(3, 2, 3, 130, width)
    (source,) = kernels_of(joined, *parts)
    assert f"%{width}" not in source
    for got, want in zip(fusion.fuse(joined, options={"target": "c"})(*parts), joined(*parts.double()), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)


def mean_of_marked(x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(~marked[..., None], 0.0).sum(1) / marked.sum(1, keepdim=True)


def largest_of_marked(x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    return torch.where(marked[..., None], x, -torch.inf).amax(1)


@pytest.mark.parametrize("f", [mean_of_marked, largest_of_marked])
def test_rows_that_do_not_count_are_skipped(f: Callable[..., torch.Tensor]) -> None:
    """A choice by the same condition in all lanes is a branch around them; as a choice it has no vector form."""
    x, marked = torch.randn(6, 300, 80), torch.rand(6, 300) < 0.5
    x[0, 0] = torch.nan
    marked[0, 0], marked[1, 0] = False, True
    source = "\n".join(kernels_of(f, x, marked))
    assert re.search(r"if \(\w+\)\n +#pragma omp simd\n", source)
    assert not re.search(r"\? in0\[|\? in0_0", source)
    got = fusion.fuse(f, options={"target": "c", "strict": True})(x, marked)
    torch.testing.assert_close(got.double(), f(x.double(), marked), atol=1e-6, rtol=1e-5)


def test_rows_that_are_all_read_elsewhere_stay_choices() -> None:
    """The loop also stores: it has no rows to skip."""

    def f(x, marked):
        chosen = torch.where(marked[..., None], x, 0.0)
        return chosen, chosen.sum(1)

    x, marked = torch.randn(6, 300, 80), torch.rand(6, 300) < 0.5
    for got, want in zip(fusion.fuse(f, options={"target": "c"})(x, marked), f(x.double(), marked), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", [None, 1])
def test_the_gradient_of_a_table_with_few_rows_adds_each_token_once(padding: int | None) -> None:
    ids, table = torch.randint(0, 2, (4, 60)), torch.randn(2, 96, requires_grad=True)
    gradient = torch.randn(4, 60, 96)
    fused = fusion.fuse(lambda: F.embedding(ids, table, padding), options={"target": "c", "strict": True})
    (got,) = torch.autograd.grad(fused(), table, gradient)
    exact = torch.zeros(2, 96, dtype=torch.float64).index_add(0, ids.flatten(), gradient.double().flatten(0, 1))
    if padding is not None:
        exact[padding] = 0
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)
    (source,) = [k.source for k in fusion.report(fused).kernels if "embedding_dense_backward" in k.name]
    assert re.search(r"if \(\w+( & \w+)*\)\n +#pragma omp simd\n", source)
    assert loops_in_lanes(source) >= 2 and ("-1" in source) <= (padding is not None)


@pytest.mark.parametrize("columns", [(256, 256, 256), (40, 1000, 3), (2000, 500)], ids=str)
def test_columns_that_are_concatenated_and_summed_are_cut_into_pieces(columns: tuple[int, ...]) -> None:
    """Also where threads share them: each piece reads neighbours, and adds to its part of the sums."""

    def f(*parts):
        joined = torch.cat(parts, -1)
        return joined, joined.sum(0), joined.abs().amax(0)

    parts = [torch.randn(200, width) for width in columns]
    (source,) = kernels_of(f, *parts)
    body = source[source.index("omp parallel for") :]
    assert not re.search(r"\? in\d+\[|yes", body)
    assert len(re.findall(r"if \(first\d+ < last\d+\)\n", body)) == len(columns)
    for got, want in zip(fusion.fuse(f, options={"target": "c"})(*parts), f(*(x.double() for x in parts)), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(16384, 64), (4096, 1024), (4096, 100)])
def test_threads_sum_the_columns_of_rows_of_their_own(rows: int, columns: int) -> None:
    """Each reads whole rows, of a page at most; the accumulators of few columns stay in registers."""
    x = torch.randn(rows, columns)
    parts, _ = kernels_of(lambda x: x.sum(0), x)
    assert f"float32[{columns}, 16] strides [1, {columns}], written" in parts
    assert "omp parallel for num_threads(threads)" in parts
    assert ("width" in parts) <= (columns > 64)
    for f in (lambda x: x.sum(0), lambda x: x.amax(0), lambda x: torch.softmax(x, 0)):
        torch.testing.assert_close(
            fusion.fuse(f, options={"target": "c"})(x).double(), f(x.double()), atol=1e-4, rtol=1e-5
        )


@pytest.mark.parametrize(("rows", "columns"), [(200, 1024), (64, 1 << 15)])
def test_columns_of_few_rows_or_of_many_pages_are_summed_at_once(rows: int, columns: int) -> None:
    (source,) = kernels_of(lambda x: x.sum(0), torch.randn(rows, columns))
    assert f"float32[{columns}] strides [1], written" in source
