"""Rows times integers in fixed point: exact sums, numbers that do not fit, rows that are left to floats."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.codegen.c.compiler import find_compiler
from fusion.codegen.c.text.fixed_point_products import BYTE_DOTS, PAIRS_OF_BYTES
from fusion.codegen.c.text.prelude import prelude
from fusion.codegen.c.text.skinny import Stream, stream_text

BF16 = torch.bfloat16
OPTIONS = {"target": "c", "strict": True}

PROBE = """
#include <stdio.h>
#include <string.h>
static void (*volatile arrange)(const float *, int64_t, int64_t, int64_t, void *) = arranged_{name};
static void sum(const void *x, const void *w, int64_t count, const float *scales, int64_t pitch, int64_t depth,
        float *sums) {{
    columns_{name}(x, w, count, scales, pitch, depth, sums);
}}
static void (*volatile add)(const void *, const void *, int64_t, const float *, int64_t, int64_t, float *) = sum;
int main(void) {{
    enum {{ depth = {depth}, count = {count}, pitch = depth / {group} + 32 }};
    _Alignas(64) static float x[depth], scales[count * pitch], arranged[{words}], sums[count + 1];
    static unsigned char w[count * depth * {bits} / 8];
    for (int i = 0; i < depth; i++) x[i] = (i * 7 % 31) - 15;
    for (int i = 0; i < (int)sizeof w; i++) w[i] = i * 37 + i / 5;
    for (int c = 0; c < count; c++)
        for (int i = 0; i < depth / {group}; i++) scales[c * pitch + i] = 1 + (i + c) % 3;
    const int step = {per_word} * stream_lanes;
    arrange(x, depth, 0, (depth + step - 1) / step, arranged);
    sums[count] = 7;
    add(arranged, w, count, scales, pitch, depth, sums);
    for (int c = 0; c < count + 1; c++) printf(" %.0f", sums[c]);
    return 0;
}}
"""
"""The functions are called through pointers: neither is compiled for one depth.  Only sums of columns are written."""

STREAMS = [
    Stream(8, 1, signed=True, pairs=1),
    Stream(8, 1, offset=-128, pairs=2, columns=4),
    Stream(8, 1, signed=True, group=32, pairs=1, columns=2),
    Stream(8, 1, signed=True, group=512, pairs=1, columns=2),
    Stream(8, 1, signed=True, group=128, pairs=1, columns=2, coarse=True),
    Stream(8, 1, offset=-128, group=32, pairs=1, columns=4, coarse=True),
    Stream(4, 1, offset=-8, pairs=1),
    Stream(4, 1, signed=True, pairs=2, columns=4),
    Stream(4, 1, offset=-8, high=True, group=32, pairs=1, columns=4),
    Stream(4, 1, signed=True, high=True, group=128, pairs=1, columns=4),
    Stream(4, 1, offset=-8, group=128, pairs=1, columns=4, coarse=True),
    Stream(4, 1, signed=True, group=32, pairs=2, columns=4, coarse=True),
]


def weights(stream: Stream, depth: int, column: int) -> list[int]:
    """A row of weights of the probe, as the stream reads it."""
    size = depth * stream.bits // 8
    held = [(i * 37 + i // 5) % 256 for i in range(column * size, (column + 1) * size)]
    if stream.bits == 4:
        order = (4, 0) if stream.high else (0, 4)
        held = [byte >> shift & 15 for byte in held for shift in order]
    sign = 1 << (stream.bits - 1)
    return [(n - 2 * sign if stream.signed and n >= sign else n) + stream.offset for n in held]


def expected(stream: Stream, depth: int, column: int) -> int:
    """The sum of a column of the probe."""
    terms = ((k, ((k * 7 % 31) - 15) * w) for k, w in enumerate(weights(stream, depth, column)))
    return sum(term * (1 if stream.group is None else 1 + (k // stream.group + column) % 3) for k, term in terms)


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
@pytest.mark.parametrize("flags", [(), ("-mno-avx512f",), ("-mno-avx2",)], ids=["native", "avx2", "floats"])
def test_sums_of_integers_are_exact(tmp_path, stream, flags):
    """Compare integers below 2^24 with Python's, for whole and odd numbers of blocks and of columns."""
    depths = [depth for depth in (160, 1024, 1120, 1152) if depth % (stream.group or 32) == 0]
    for number, depth in enumerate(depths):
        fixed, count = stream.fixed_point, max(1, stream.columns - number % 2)
        assert fixed is not None
        words = {
            "depth": depth,
            "group": stream.group or depth,
            "bits": stream.bits,
            "name": stream.name,
            "count": count,
        }
        text = stream_text(stream) + PROBE.format(per_word=stream.per_word, words=fixed.words(depth), **words)
        (tmp_path / "probe.c").write_text(prelude(text) + text)
        program = tmp_path / "probe"
        find_compiler().call(*find_compiler().flags(), *flags, str(tmp_path / "probe.c"), "-o", str(program))
        got = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
        assert list(map(int, got)) == [*(expected(stream, depth, column) for column in range(count)), 7], depth


def test_a_processor_has_one_set_of_instructions():
    """Registers of 64 bytes with dot products of bytes, of 32 bytes where none are wider, or floats."""
    text = stream_text(Stream(8, 1, signed=True, group=32, pairs=1, columns=2, coarse=True))
    narrow, wide, floats = (
        text.index(f"#if {PAIRS_OF_BYTES.condition}"),
        text.index(BYTE_DOTS.condition),
        text.index("#else"),
    )
    assert narrow < wide < floats
    assert "short_products(" in text[narrow:wide] and "byte_dots(" not in text[narrow:wide]
    assert text[wide:floats].count("byte_dots(third, whole, terms + 128)") == 1, "of three terms, and not of two"
    assert not re.search("byte_dots|_products", text[floats:])


def product(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * scale[:, None])


def rows() -> dict[str, Tensor]:
    """Rows of 300 numbers that are hard to round together."""
    plain = torch.randn(1, 300)
    outlier, zeros, small, large = plain.clone(), plain.clone(), plain * 1e-37, plain * 1e33
    outlier[0, 5] = 3e6
    zeros[0, 10:] = 0
    return {"outlier": outlier, "zeros": zeros, "small": small, "large": large, "subnormal": plain * 1e-39}


@pytest.mark.parametrize("name", list(rows()))
def test_rows_of_uneven_numbers_are_as_exact_as_eager(name):
    """With a weight of zero at an outlier, what is left are the numbers that a common exponent would round away."""
    torch.manual_seed(3)
    x, w = rows()[name].to(BF16), torch.randint(-127, 128, (24, 300), dtype=torch.int8)
    w[:, 5] = 0
    scale = torch.full((24,), 0.125).to(BF16)
    got, eager = fusion.fuse(product, options=OPTIONS)(x, w, scale), product(x, w, scale)
    exact = product(x.double(), w, scale.double())
    assert (got.double() - exact).norm() <= 2 * (eager.double() - exact).norm() + 1e-3 * exact.norm()


def uneven(name: str, dtype: torch.dtype) -> Tensor:
    """A row of 512 numbers, for 15 bits: all of them, full mantissas, heavy tails, outliers, few large numbers."""
    x = torch.randn(1, 512)
    if name == "mantissas":
        x = torch.full((1, 512), 1.9921875) * torch.randint(0, 2, (1, 512)).mul(2).sub(1)
    elif name == "just below":
        x = torch.full((1, 512), 1.9921569) * torch.randint(0, 2, (1, 512)).mul(2).sub(1)
    elif name == "tails":
        x = x * torch.randn(1, 512) * torch.randn(1, 512).exp()
    elif name == "outliers":
        x[0, ::128] *= 2.0**12
    elif name == "many outliers":
        x[0, ::8] *= 2.0**9
    elif name == "tiny":
        x *= 2.0**-120
    return x.to(dtype)


@pytest.mark.parametrize("name", ["plain", "mantissas", "just below", "tails", "outliers", "many outliers", "tiny"])
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_two_terms_are_as_exact_as_eager(name, wide, bits):
    """Weights of 0 at each large number leave what 15 bits would round away; a row times 1.25 is no longer bfloat16."""
    torch.manual_seed(1)
    layer = fusion.quantize_weights(
        torch.nn.Sequential(torch.nn.Linear(512, 24, bias=False)).to(BF16), bits=bits, group=128
    )
    x, weight = uneven(name, BF16), layer[0].weight
    if bits == 4:
        weight[:, ::4] = weight[:, ::4] & 240 | 8  # of each eighth number
    else:
        weight[:, ::8] = 0

    def program(x: Tensor) -> Tensor:
        return layer((x.float() * 1.01).to(BF16) if wide else x)

    with torch.no_grad():
        got, eager = fusion.fuse(program, options=OPTIONS)(x), program(x)
        exact = F.linear(program_row(x, wide), layer[0].numbers(torch.float64))
    assert (got - exact).norm() <= 2 * (eager - exact).norm()


def program_row(x: Tensor, wide: bool) -> Tensor:
    """The row that is multiplied, before it is rounded."""
    return x.double() * torch.tensor(1.01).double() if wide else x.double()


@pytest.mark.parametrize("columns", [8, 9, 11])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 32), (4, 128)])
def test_a_number_of_columns_that_is_not_whole(columns, bits, group):
    """Two products of a row are in turn, and the last columns of each are fewer."""
    torch.manual_seed(0)
    gate, up = (torch.nn.Sequential(torch.nn.Linear(384, columns, bias=False)).to(BF16) for _ in range(2))
    for layer in (gate, up):
        fusion.quantize_weights(layer, bits=bits, group=group)

    def program(x: Tensor) -> Tensor:
        return F.silu(gate(x)) * up(x)

    x = torch.randn(1, 384).to(BF16)
    with torch.no_grad():
        got, eager = fusion.fuse(program, options=OPTIONS)(x), program(x)
        for layer in (gate, up):
            layer.double()
        exact = program(x.double())
    assert (got - exact).norm() <= 2 * (eager - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_not_finite_numbers_are_left_to_floats(number):
    x, w = torch.randn(1, 256).to(BF16), torch.randint(-127, 128, (24, 256), dtype=torch.int8)
    x[0, 200], w[3, 200] = number, 0
    scale = torch.rand(24).to(BF16)
    got, eager = fusion.fuse(product, options=OPTIONS)(x, w, scale), product(x, w, scale)
    torch.testing.assert_close(got, eager, equal_nan=True)
