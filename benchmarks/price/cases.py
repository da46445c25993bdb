"""The programs whose kernels are priced, at sizes that take 0.1 to 50 ms a kernel on a CPU, 5 µs to 5 ms on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, zip_longest

import torch
from torch import Tensor

from benchmarks import programs as common
from benchmarks.price import programs
from benchmarks.programs import Case, Draw

F32, BF16, I8, U8, I64, BOOL = torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool
Program = Callable[..., Tensor | tuple[Tensor, ...]]
Shape = tuple[int, ...]


class Sizes:
    """The sizes of one device: `on(cpu, gpu)` picks; `wide` is the dtype of most programs."""

    def __init__(self, device: str) -> None:
        self.is_gpu = device == "cuda"
        self.wide = BF16 if self.is_gpu else F32

    def on(self, cpu: Shape, gpu: Shape) -> Shape:
        """Return the shape for the device."""
        return gpu if self.is_gpu else cpu

    def draw(self, cpu: Shape, gpu: Shape, dtype: torch.dtype | None = None, **more: float) -> Draw:
        """Return an input of the shape for the device."""
        return Draw(self.on(cpu, gpu), dtype or self.wide, **more)  # type: ignore[arg-type]  # scale, or integer bounds


def cases(device: str) -> tuple[Case, ...]:
    """Return all cases of a device, one of each family in turn, so that any beginning of them has every family."""
    sizes = Sizes(device)
    families = (_maps, _moves, _rows, _columns, _indices, _products, _quantised, _attention, _training)
    rounds = zip_longest(*(list(family(sizes)) for family in families))
    return tuple(case for case in chain.from_iterable(rounds) if case is not None)


def _case(family: str, program: Program, *inputs: Draw, gradients: bool = False) -> Case:
    """Return a case that is named by its family, its program, and the shape and dtype of its first inputs."""
    shapes = " ".join("x".join(map(str, draw.shape)) for draw in inputs[:2])
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    training = ", training" if gradients else ""
    return Case(f"{family}: {program.__name__} {shapes} {dtype}{training}", program, inputs, gradients=gradients)


def _maps(sizes: Sizes) -> Iterator[Case]:
    line, matrix = sizes.on((1 << 22,), (1 << 26,)), sizes.on((1024, 2048), (8192, 4096))
    for dtype in (F32, BF16):
        x, row = Draw(matrix, dtype), Draw(matrix[1:], dtype)
        yield _case("map", common.vector_add, Draw(line, dtype), Draw(line, dtype))
        yield _case("map", common.gelu_chain, x, row)
        yield _case("map", common.bias_gelu, x, row)
        yield _case("map", programs.exponentials, x)
    x = Draw(matrix, sizes.wide)
    yield _case("map", common.pointwise_chain, x, Draw(matrix[1:], sizes.wide))
    yield _case("map", common.vector_add, *(sizes.draw((98_431,), (98_431,), F32),) * 2)
    yield _case("map", programs.outer_sum, Draw(matrix[:1], F32), Draw(matrix[1:], F32))
    yield _case("map", programs.quotient, x, x)
    yield _case("map", programs.power, x)
    yield _case("map", programs.selected, x, x)
    yield _case("map", programs.widened, Draw(matrix, BF16))
    yield _case("map", programs.narrowed, Draw(matrix, F32))
    yield _case("map", programs.integers, *(Draw(matrix, I64),) * 2)
    yield _case("map", programs.integers, *(Draw(matrix, I8),) * 2)
    yield _case("map", programs.dropout_gelu, x)
    yield _case("map", programs.swiglu_gate, x)
    shapes = sizes.on((768, 768), (4096, 1024)), matrix[1:], (3, 5, 7)
    yield _case("map", programs.adam, *[Draw(shape, F32) for shape in shapes] * 4)


def _moves(sizes: Sizes) -> Iterator[Case]:
    square, image = sizes.on((1024, 1024), (8192, 4096)), sizes.on((8, 64, 56, 56), (64, 64, 112, 112))
    for dtype in (F32, BF16):
        x, turned = Draw(square, dtype), Draw(square[::-1], dtype)
        yield _case("move", programs.transposed_add, x, turned)
        yield _case("move", programs.transposed_copy, x)
        yield _case("move", programs.channels_last, Draw(image, dtype))
    x, pixels = Draw(square, sizes.wide), Draw(image, sizes.wide)
    yield _case("move", programs.heads_first, sizes.draw((8, 256, 12, 64), (16, 2048, 16, 128)))
    for program in (programs.every_second, programs.flipped, programs.rolled, programs.lower_triangle):
        yield _case("move", program, x)
    yield _case("move", programs.concatenated, x, x)
    yield _case("move", programs.stacked, x, x)
    for program in (programs.padded, programs.reflected, programs.enlarged, programs.bilinear):
        yield _case("move", program, pixels)
    angles = sizes.draw((1024, 64), (4096, 128))
    yield _case("move", programs.rotated, sizes.draw((8, 1024, 64), (32, 4096, 128)), angles, angles)


def _rows(sizes: Sizes) -> Iterator[Case]:
    elements = 1 << (22 if not sizes.is_gpu else 25)
    for length in (64, 781, 4096, 16384, 1 << 17):
        yield _case("row", common.softmax, Draw((elements // length, length), F32))
    for length in (257, 1024, 8192):
        x = Draw((elements // length, length), sizes.wide)
        weight = Draw((length,), sizes.wide)
        yield _case("row", common.layer_norm, x, weight, weight)
        yield _case("row", common.rms_norm, x, weight)
        yield _case("row", programs.row_maximum, x)
        yield _case("row", programs.log_softmax, x)
    x, gain = sizes.draw((2048, 1024), (8192, 4096)), sizes.draw((1024,), (4096,))
    for program in (programs.log_sum_exp, programs.row_sum, programs.largest_place, programs.row_variance):
        yield _case("row", program, x)
    yield _case("row", programs.unit_rows, x)
    yield _case("row", programs.add_rms_norm, x, x, gain)
    words = sizes.on((256, 8192), (4096, 50257))
    yield _case("row", common.cross_entropy, Draw(words, sizes.wide), Draw(words[:1], I64, high=words[1]))
    for shape in (sizes.on((512, 4096), (1024, 32768)), sizes.on((8, 1 << 17), (16, 1 << 20))):
        yield _case("scan", programs.running_sum, Draw(shape, F32))
    yield _case("scan", programs.running_product, x)
    yield _case("scan", programs.running_log_sum, Draw(x.shape, F32))
    yield _case("scan", programs.running_column_sum, Draw(x.shape, F32))


def _columns(sizes: Sizes) -> Iterator[Case]:
    tall = (
        sizes.on((16384, 64), (1 << 18, 64)),
        sizes.on((4096, 1024), (65536, 1024)),
        sizes.on((64, 1 << 15), (64, 1 << 18)),
    )
    for shape in tall:
        for dtype in (F32, BF16):
            yield _case("column", programs.column_sum, Draw(shape, dtype))
    x, pixels = Draw(tall[1], sizes.wide), sizes.draw((8, 64, 56, 56), (64, 128, 56, 56))
    yield _case("column", programs.column_maximum, x)
    yield _case("column", programs.column_softmax, Draw(tall[1], F32))
    yield _case("column", programs.middle_mean, sizes.draw((16, 256, 512), (64, 512, 1024)))
    yield _case("column", programs.total, x)
    yield _case("column", programs.squared_error, x, x)
    yield _case("column", programs.image_mean, pixels)
    channels = Draw(pixels.shape[1:2], sizes.wide)
    yield _case("column", programs.group_norm_silu, pixels, channels, channels)
    wide_channels = Draw(pixels.shape[1:2], F32)
    yield _case("column", programs.batch_norm, Draw(pixels.shape, F32), wide_channels, wide_channels)
    for program in (programs.max_pool, programs.average_pool, programs.pooled_squares):
        yield _case("pool", program, pixels)
    yield _case("pool", programs.max_pool_rows, sizes.draw((16, 32, 4096), (64, 192, 8192), F32))


def _indices(sizes: Sizes) -> Iterator[Case]:
    rows, width = sizes.on((20_000, 128), (100_000, 512))
    (ids,) = sizes.on((8192,), (65_536,))
    table, index = Draw((rows, width), sizes.wide), Draw((ids,), I64, high=rows)
    weight = Draw((width,), sizes.wide)
    yield _case("gather", programs.embedding, index, table)
    yield _case("gather", programs.embedding_layer_norm, index, table, weight, weight)
    yield _case("gather", programs.bag_of_embeddings, Draw((ids // 8, 8), I64, high=rows), table)
    matrix = sizes.on((1024, 2048), (8192, 4096))
    columns = Draw(matrix, I64, high=matrix[1])
    yield _case("gather", programs.gathered, Draw(matrix, sizes.wide), columns)
    yield _case("scatter", programs.added_rows, Draw((rows, width), F32), index, Draw((ids, width), F32))
    yield _case("scatter", programs.scattered, Draw(matrix, F32), columns, Draw(matrix, F32))
    yield _case("scatter", programs.histogram, Draw((sizes.on((1 << 18,), (1 << 22,))[0],), I64, high=1024))


def _products(sizes: Sizes) -> Iterator[Case]:
    for size in sizes.on((256, 512, 1024), (1024, 2048, 4096)):
        for dtype in (F32, BF16) if sizes.is_gpu or size == 512 else (F32,):
            yield _case("product", common.matmul_relu, *(Draw((size, size), dtype),) * 2)
    m, k, n = sizes.on((512, 512, 1024), (8192, 1024, 4096))
    x, weight, bias = Draw((m, k), sizes.wide), Draw((n, k), sizes.wide, k**-0.5), Draw((n,), sizes.wide)
    square, gain = Draw((k, k), sizes.wide, k**-0.5), Draw((k,), sizes.wide)
    yield _case("product", programs.linear_gelu, x, weight, bias)
    yield _case("product", programs.linear_residual, x, weight, bias, Draw((m, n), sizes.wide))
    yield _case("product", programs.linear_residual_norm, x, square, gain, x, gain)
    yield _case("product", programs.relu_linear, x, weight)
    yield _case("product", programs.norm_linear, x, gain, weight)
    yield _case("product", programs.norm_qkv, x, gain, square, square, square)
    yield _case("product", programs.swiglu, x, weight, weight, Draw((k, n), sizes.wide, n**-0.5))
    yield _case("product", programs.transposed_product, x, Draw((m, n), sizes.wide))
    yield _case("product", programs.matmul_softmax, x, Draw((k, k), sizes.wide))
    odd = sizes.on((250, 501, 503), (1000, 1001, 1003))
    yield _case("product", common.matmul_relu, Draw(odd[:2], sizes.wide), Draw(odd[1:], sizes.wide))
    heads = sizes.on((16, 128, 64), (128, 512, 64))
    yield _case(
        "product", programs.batched_product, Draw(heads, sizes.wide), Draw((heads[0], 64, heads[1]), sizes.wide)
    )
    yield _case("product", programs.distances, x, Draw((n, k), sizes.wide))
    deep = sizes.on((16, 1 << 15), (16, 1 << 17))
    yield _case("product", common.matmul_relu, Draw(deep, sizes.wide), Draw(deep[::-1], sizes.wide))
    for rows in (1, 16):
        yield _case(
            "product", programs.linear_gelu, *_few_rows(sizes, rows), Draw(sizes.on((2048,), (14336,)), sizes.wide)
        )
    step = sizes.on((64, 256), (256, 1024))
    inner = step[1] * 2
    yield _case(
        "product",
        programs.recurrent,
        Draw((4, *step), F32),
        Draw(step, F32),
        Draw((step[1], inner), F32, inner**-0.5),
        Draw(step[1:], F32),
    )


def _few_rows(sizes: Sizes, rows: int) -> tuple[Draw, Draw]:
    """Return the operands of a linear layer with few rows."""
    n, k = sizes.on((2048, 1024), (14336, 4096))
    return Draw((rows, k), sizes.wide), Draw((n, k), sizes.wide, k**-0.5)


def _quantised(sizes: Sizes) -> Iterator[Case]:
    n, k = sizes.on((2048, 1024), (14336, 4096))
    for rows in (1, 16, 256):
        x = Draw((rows, k), sizes.wide)
        yield _case(
            "quantised", programs.int8_linear, x, Draw((n, k), I8, low=-127, high=128), Draw((n,), sizes.wide, 0.01)
        )
        packed, scale = Draw((n, k // 2), U8, high=256), Draw((n, k // 128), sizes.wide, 0.01)
        yield _case("quantised", programs.int4_linear, x, packed, scale)


def _attention(sizes: Sizes) -> Iterator[Case]:
    for length in sizes.on((256, 1024), (1024, 4096)):
        qkv = (sizes.draw((1, 8, length, 64), (2, 16, length, 128)),) * 3
        for program in (
            common.attention,
            common.causal_attention,
            programs.fused_attention,
            programs.fused_causal_attention,
        ):
            yield _case("attention", program, *qkv)
    (length,) = sizes.on((512,), (2048,))
    qkv = (sizes.draw((1, 8, length, 64), (2, 16, length, 64)),) * 3
    mask = Draw((length, length), BOOL, low=0, high=2)
    yield _case("attention", programs.masked_attention, *qkv, mask)
    yield _case("attention", programs.fused_masked_attention, *qkv, mask)
    yield _case("attention", programs.softcapped_attention, *qkv)
    yield _case("attention", programs.windowed_attention, *qkv)
    angles = Draw((length, 64), sizes.wide)
    yield _case("attention", programs.rotary_attention, *qkv, angles, angles)
    cache = sizes.draw((4, 2, 1024, 64), (8, 8, 4096, 128))
    yield _case("attention", programs.decoding, sizes.draw((4, 8, 1, 64), (8, 32, 1, 128)), cache, cache)


def _training(sizes: Sizes) -> Iterator[Case]:
    x, gain = sizes.draw((1024, 1024), (8192, 4096)), sizes.draw((1024,), (4096,))
    pixels = sizes.draw((4, 64, 56, 56), (32, 128, 56, 56), F32)
    channels = Draw(pixels.shape[1:2], F32)
    words = sizes.on((256, 8192), (4096, 50257))
    m, k, n = sizes.on((256, 512, 1024), (8192, 768, 3072))
    weight, bias = Draw((n, k), sizes.wide, k**-0.5), Draw((n,), sizes.wide)
    (length,) = sizes.on((256,), (2048,))
    qkv = (sizes.draw((1, 8, length, 64), (2, 16, length, 64)),) * 3
    table = sizes.draw((20_000, 128), (100_000, 512))
    ids = Draw(sizes.on((8192,), (65_536,)), I64, high=table.shape[0])
    listed: Iterable[tuple[Program, tuple[Draw, ...]]] = (
        (common.layer_norm, (x, gain, gain)),
        (common.rms_norm, (x, gain)),
        (common.softmax, (x,)),
        (common.gelu_chain, (x, gain)),
        (programs.dropout_gelu, (x,)),
        (common.cross_entropy, (Draw(words, sizes.wide), Draw(words[:1], I64, high=words[1]))),
        (programs.batch_norm, (pixels, channels, channels)),
        (programs.group_norm_silu, (pixels, channels, channels)),
        (programs.max_pool, (pixels,)),
        (programs.embedding, (ids, table)),
        (programs.linear_gelu, (Draw((m, k), sizes.wide), weight, bias)),
        (programs.swiglu, (Draw((m, k), sizes.wide), weight, weight, Draw((k, n), sizes.wide, n**-0.5))),
        (programs.linear_cross_entropy, (Draw((m, k), sizes.wide), weight, Draw((m,), I64, high=n))),
        (common.causal_attention, qkv),
        (programs.fused_causal_attention, qkv),
    )
    for program, inputs in listed:
        yield _case("training", program, *inputs, gradients=True)
