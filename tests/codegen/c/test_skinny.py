"""Products of a few rows with weights of which each is read once: all widths, against float64 and eager."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.codegen.binary import Callee
from fusion.codegen.c.compiler import find_compiler
from fusion.codegen.c.loops.grid import STACK
from fusion.codegen.c.plan.threads import ENOUGH
from fusion.codegen.c.standalone.program import kernel_text
from fusion.codegen.c.text.skinny import MOST_SKINNY_ROWS, Stream, stream_text
from fusion.codegen.standalone import KernelSource
from fusion.lowering.ir.expr import Op
from fusion.lowering.ir.kernel import Fold, Store
from tests.codegen.c.kernels import WHOLE, axis, i0, i1, r0, run
from tests.codegen.kernels.making import load

BF16, F32 = torch.bfloat16, torch.float32
OPTIONS = {"target": "c", "strict": True}
SUMS = "sums_"
"""How the functions of the form begin."""


def sources(fused: Callable[..., object]) -> list[str]:
    """The kernels of the last graph."""
    return [kernel.source for kernel in fusion.report(fused).graphs[-1].kernels]


def check(f: Callable[..., Tensor], *given: Tensor, streams: bool = True, calls: tuple[str, ...] = ()) -> str:
    """Compare with float64, with twice eager's error as bound; return the source."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
    exact, eager = f(*wide), f(*given)
    fused = fusion.fuse(f, options=OPTIONS)
    got = fused(*given)
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    errors = [(result.double() - exact).norm() for result in (got, eager)]
    assert errors[0] <= 2 * errors[1] + 1e-5 * exact.norm(), errors
    kernels = sources(fused)
    text = "\n".join(kernels)
    assert (SUMS in text) == streams, text
    assert len(kernels) == 1 or not streams, text
    for call in calls:
        assert call in text, text
    return text


def per_channel(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * scale[:, None])


def in_groups(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, (w.to(x.dtype).view(*scale.shape, -1) * scale[..., None]).view(len(w), -1))


def low_first(w: Tensor) -> Tensor:
    return torch.stack((w & 15, w >> 4), -1).view(len(w), -1).to(torch.int8) - 8


def high_first(w: Tensor) -> Tensor:
    return torch.stack((w >> 4, w & 15), -1).view(len(w), -1).to(torch.int8) - 8


def signed(w: Tensor) -> Tensor:
    return torch.stack(((w << 4) >> 4, w >> 4), -1).view(len(w), -1)


def stored(width: int, n: int, k: int) -> Tensor:
    if width == 8:
        return torch.randint(-128, 128, (n, k), dtype=torch.int8)
    return torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 40, 256), (1, 33, 1000), (3, 65, 134), (8, 17, 520)], ids=str)
def test_rows_times_floats(dtype, rows, n, k):
    text = check(F.linear, torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype))
    assert f"{'bf16_pairs' if dtype is BF16 else 'float_floats'}_{rows}(" in text


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("n", "k"), [(40, 256), (33, 300)], ids=str)
def test_rows_times_bytes(dtype, rows, n, k):
    x, scale = torch.randn(rows, k).to(dtype), torch.rand(n).to(dtype) + 0.1
    check(per_channel, x, stored(8, n, k), scale)
    check(lambda x, w, s: per_channel(x, w.view(torch.uint8).to(torch.int16) - 128, s), x, stored(8, n, k), scale)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("k", "group"), [(256, 32), (416, 32), (512, 128), (1024, 512)], ids=str)
def test_groups_of_bytes_share_a_scale(dtype, rows, k, group):
    x, scale = torch.randn(rows, k).to(dtype), torch.rand(24, k // group).to(dtype) + 0.1
    text = check(in_groups, x, stored(8, 24, k), scale)
    assert f"int8_by{group}_" in text


@pytest.mark.parametrize("unpacked", [low_first, high_first, signed])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("rows", "k", "group"), [(1, 256, 32), (4, 288, 32), (1, 1024, 128), (16, 512, 256)], ids=str)
def test_halves_of_bytes(unpacked, dtype, rows, k, group):
    x, scale = torch.randn(rows, k).to(dtype), torch.rand(20, k // group).to(dtype) + 0.1
    w = stored(8, 20, k // 2) if unpacked is signed else stored(4, 20, k)
    text = check(lambda x, w, s: in_groups(x, unpacked(w), s), x, w, scale)
    names = {low_first: "uint4_minus8_by", high_first: "uint4_high_minus8_by", signed: "int4_by"}
    assert names[unpacked] + str(group) in text


def test_halves_of_bytes_with_a_scale_for_each_row():
    x, scale = torch.randn(2, 260).to(BF16), torch.rand(20).to(BF16) + 0.1
    check(lambda x, w, s: per_channel(x, low_first(w), s), x, stored(4, 20, 260), scale)


def test_a_norm_before_is_computed_once_and_what_follows_is_fused():
    def block(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        rows = gain * normal.to(x.dtype)
        return F.silu(F.linear(rows, gate)) * F.linear(rows, up)

    x, gain = torch.randn(1, 512).to(BF16), torch.rand(512).to(BF16) + 0.5
    text = check(block, x, gain, *(torch.randn(48, 512).to(BF16) / 20 for _ in range(2)), calls=("_staged(",))
    main = text[text.rindex("\nint ") :]
    assert main.count("sums_bf16_two_pairs_1(") == 2 and "rsqrt" not in main and "sqrtf" not in main


@pytest.mark.parametrize("shape", [(256,), (1, 1, 256), (2, 3, 256)], ids=str)
def test_a_residual_is_added_to_each_row(shape):
    def f(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, w).relu() + residual

    x, residual = torch.randn(shape).to(BF16), torch.randn(*shape[:-1], 24).to(BF16)
    check(f, x, torch.randn(24, 256).to(BF16), residual)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 128, 128), (1, 45, 200), (8, 256, 256), (5, 300, 256)], ids=str)
def test_what_follows_sums_is_computed_in_lanes(rows, n, k):
    def step(h: Tensor, w: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(h, w, bias) + x)

    given = torch.randn(rows, k), torch.randn(n, k) / k**0.5, torch.randn(n), torch.randn(rows, n)
    text = check(step, *given)
    main = text[text.index("\nint ") :]
    *_, results = main.split("#pragma omp simd\n")
    assert results.lstrip().startswith("for (int64_t i") and "tanhf(sum0[" in results and SUMS not in results, main
    shared = rows * n * k >= ENOUGH
    assert ("< threads; part0++)" in main) == ("#pragma omp for nowait\n" in main) == shared, main
    assert main.count("#pragma omp parallel num_threads(threads)") == shared, "one region"
    assert ("aligned_alloc(" in main) == shared, "few numbers are on the stack"
    results_of = {}
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):  # whose parts are no whole blocks
            torch.set_num_threads(threads)
            results_of[threads] = fusion.fuse(step, options=OPTIONS)(*given)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, results_of[1]) for each in results_of.values())


def product_of(row: sympy.Expr) -> Fold:
    """The sum of products of x with a row of weights that begins at `row`, over 128 terms."""
    return Fold("sum0", "sum", (Op("mul", (load("x", r0), load("w", row + r0)), F32),), (r0,), F32)


def test_few_columns_of_several_axes_are_shared_by_all_threads():
    x, w, out = torch.randn(1, 128), torch.randn(300, 9, 128) / 10, torch.zeros(300, 9)
    fold = product_of(1152 * i0 + 128 * i1)
    store = Store("out", 9 * i0 + i1, Op("tanh", (fold.ref,), F32))
    axes = [axis(i0, 300), axis(i1, 9), axis(r0, 128, WHOLE)]
    text = run({"x": x, "w": w}, {"out": out}, axes, fold, store)
    assert "#pragma omp for nowait collapse(2)" in text and "< threads; part0++)" in text, text
    torch.testing.assert_close(out, torch.tanh(w @ x[0]))


def test_sums_of_many_products_fill_smaller_blocks():
    def f(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.tanh(F.linear(x, w)) for w in weights)

    x, weights = torch.randn(16, 128), [torch.randn(32, 128) / 10 for _ in range(12)]
    fused = fusion.fuse(f, options=OPTIONS)
    for got, expected in zip(fused(x, weights), f(x, weights), strict=True):
        torch.testing.assert_close(got, expected)
    text = "\n".join(sources(fused))
    blocks = {int(size) for size in re.findall(r"_Alignas\(64\) float sum\d+\[(\d+)\]", text)}
    assert blocks and all(size * 4 * text.count("_Alignas(64) float sum") <= STACK for size in blocks), text


def test_indices_behind_sums_are_checked_in_lanes():
    def f(x: Tensor, w: Tensor, table: Tensor, at: Tensor) -> Tensor:
        return F.linear(x, w) + table[at]

    x, w, table, at = torch.randn(2, 128), torch.randn(40, 128), torch.randn(9), torch.arange(40) % 9
    text = check(f, x, w, table, at)
    assert "reduction(max:" in text
    fused = fusion.fuse(f, options=OPTIONS)
    at[33] = 9
    with pytest.raises(IndexError):
        fused(x, w, table, at)


def test_results_that_may_meet_are_stored_in_order():
    x, w, place = torch.randn(1, 128), torch.randn(40, 128), torch.tensor([*range(39), 5])
    out = torch.zeros(40)
    fold = product_of(128 * i0)
    store = Store("out", load("place", i0, torch.int64), fold.ref)
    inputs = {"x": x, "w": w, "place": place}
    text = run(inputs, {"out": out}, [axis(i0, 40), axis(r0, 128, WHOLE)], fold, store)
    main = text[text.rindex("\nint ") :]
    assert "sums_float" in main and "omp simd" not in main, main
    exact = (w.double() @ x.double().T)[:, 0]
    assert out[39] == 0 and torch.allclose(out[:39].double(), exact[[*range(5), 39, *range(6, 39)]], atol=1e-4)


def test_not_finite_numbers_reach_the_results_that_they_belong_to():
    for dtype in (BF16, F32):
        x, w = torch.randn(4, 256).to(dtype), torch.randn(16, 256).to(dtype)
        x[1, 3], x[2, 200], w[5, 7] = torch.inf, torch.nan, -torch.inf
        got, eager = fusion.fuse(F.linear, options=OPTIONS)(x, w), F.linear(x, w)
        assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
        assert torch.equal(got[got.isinf()], eager[eager.isinf()])


def test_an_infinity_that_is_not_rounded_stays_one():
    """A float32 factor is the sum of two bfloat16 numbers, of which the second is 0 then."""

    def f(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.linear(x * y, w)

    x, y, w = torch.ones(1, 256).to(BF16), torch.ones(256).to(BF16), torch.ones(16, 256).to(BF16)
    for number in (torch.inf, torch.nan, 3.3e38):
        y[9] = number
        got, eager = fusion.fuse(f, options=OPTIONS)(x, y, w), f(x, y, w)
        torch.testing.assert_close(got, eager, equal_nan=True)


def test_a_product_that_all_rows_share_is_left_alone():
    """The first step of a recurrent cell multiplies a state of zeros: that product has no rows of its own."""

    def first_step(x: Tensor, own: Tensor, others: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, own, bias) + F.linear(x.new_zeros(8, 256), others, bias))

    own, others = (torch.randn(256, 256) / 16 for _ in range(2))
    check(first_step, torch.randn(8, 256), own, others, torch.randn(256), streams=False)


def test_other_layouts_and_more_rows_are_left_alone():
    x, w = torch.randn(MOST_SKINNY_ROWS + 1, 256), torch.randn(40, 256)
    check(lambda a, b: F.linear(a, b).relu(), x, w, streams=False)
    check(lambda a, b: a[:1] @ b, x, w.t().contiguous(), streams=False)
    check(lambda a, b: F.linear(a[:1, :64], b[:, :64]), x, w, streams=False)  # shorter than a call is worth


def test_rows_of_a_larger_tensor_need_no_alignment():
    x, w = torch.randn(3, 301).to(BF16), torch.randn(40, 301).to(BF16)
    check(lambda x, w: F.linear(x[:, 1:260], w[3:, 1:260]), x, w)


PROBE = """
#include <stdio.h>
int main(void) {{
    enum {{ depth = {depth}, groups = depth / {group} + 32 }};
    _Alignas(64) static float x[{rows} * depth], scales[groups], sums[{rows}], arranged[{rows} * (depth + 512)];
    static unsigned char w[depth * {bits} / 8];
    for (int i = 0; i < {rows} * depth; i++) x[i] = (i * 7 % 31) - 15;
    for (int i = 0; i < (int)sizeof w; i++) w[i] = i * 37 + i / 5;
    for (int i = 0; i < depth / {group}; i++) scales[i] = 1 + i % 3;
    const int step = {per_word} * stream_lanes;
    arranged_{name}(x, depth, 0, (depth + step - 1) / step, arranged);
    sums_{name}(arranged, w, scales, depth, 1, sums);
    for (int m = 0; m < {rows}; m++) printf("%.0f\\n", sums[m]);
    return 0;
}}
"""


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-mno-avx",), ()], ids=["AVX2", "SSE", "native"])
def test_integers_are_exact_with_all_widths_of_registers(tmp_path, flags):
    """The same text for registers of 16, 32 and 64 bytes: sums of integers below 2^24 have no rounding."""
    from fusion.codegen.c.text.prelude import prelude

    for pairs in (0, 1, 2):
        stream = Stream(4, 2, offset=-8, group=32, pairs=pairs)
        depth = 32 * 19
        words = {"depth": depth, "group": 32, "rows": 2, "bits": 4, "per_word": 8, "name": stream.name}
        text = stream_text(stream) + PROBE.format(**words)
        (tmp_path / "probe.c").write_text(prelude(text) + text)
        program = tmp_path / "probe"
        find_compiler().call(*find_compiler().flags(), *flags, str(tmp_path / "probe.c"), "-o", str(program))
        got = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
        w = [(i * 37 + i // 5) % 256 for i in range(depth // 2)]
        numbers = [half - 8 for byte in w for half in (byte & 15, byte >> 4)]
        for m in range(2):
            terms = ((k, ((m * depth + k) * 7 % 31 - 15) * numbers[k]) for k in range(depth))
            assert int(got[m]) == sum(term * (1 + k // 32 % 3) for k, term in terms)


def test_kernels_of_one_library_have_functions_of_their_own():
    """Also where two kernels are called the same, and have functions of one thread's share."""

    def step(h: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(F.linear(h, w))

    text = check(step, torch.randn(8, 256), torch.randn(256, 256) / 16)
    (name,) = re.findall(r"^int (\w+)_share\(", text, re.MULTILINE)
    for number in range(2):
        source = kernel_text(number, KernelSource(Callee(name, name, 3, 0), text))
        command = [*find_compiler().command, "-E", "-P", "-x", "c", "-"]
        plain = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
        functions = set(re.findall(r"^(?:int|int64_t) (\w+)\(", plain, re.MULTILINE))
        own = f"fusion_kernel_{number}"
        assert {function for function in functions if not function.startswith("omp_")} == {
            own,
            f"{own}_share",
            f"{own}_scratch",
        }
