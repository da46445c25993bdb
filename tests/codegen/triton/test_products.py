"""The text of products and of attention in Triton, and their configurations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch

pytest.importorskip("triton")

from fusion.codegen.numerics import DEFAULT
from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.devices import H200
from fusion.codegen.triton.forms import Refused, Task
from fusion.codegen.triton.forms.chained import DescribedConfig
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.codegen.triton.forms.pointer_product import PointerProduct
from fusion.codegen.triton.forms.warp_specialised import WarpSpecialisedConfig
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.load import load
from fusion.lowering.errors import Unsupported
from fusion.lowering.indexing import FloorDiv
from fusion.lowering.ir.expr import Cast, Load, Op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Store
from tests.codegen.kernels.attention import attention_dkv, attention_dq, online_attention
from tests.codegen.kernels.making import BF16, F32, F64, b, i, j, kernel, param, r
from tests.codegen.kernels.making import load as load_expr
from tests.codegen.kernels.products import gathered_scores, matmul, transposed
from tests.codegen.triton.blocking import block
from tests.codegen.triton.texts import TARGET, body, compiles

# Text -----------------------------------------------------------------------------------------------------------------


def test_products_of_widened_operands_stay_narrow() -> None:
    example = matmul(64, 64, 64, BF16)
    loop, store = example.body
    assert isinstance(loop, Loop)
    (dot,) = loop.body
    assert isinstance(dot, Fold)
    wide = replace(dot, args=tuple(Cast(arg, F32) for arg in dot.args))
    text = body(replace(example, body=(replace(loop, body=(wide,)), store)))
    assert "ieee" not in text
    assert "tl.dot(a, b, acc)" in text


@pytest.mark.parametrize("dtype", [BF16, torch.bool])
def test_float64_products_of_narrow_loads_are_summed_without_a_dot(dtype: torch.dtype) -> None:
    """Triton aborts on a `tl.dot` of float64 with operands that were loaded as less than 32 bits."""
    example = matmul(64, 64, 64, F64)
    loop, store = example.body
    assert isinstance(loop, Loop)
    (dot,) = loop.body
    assert isinstance(dot, Fold) and isinstance(dot.args[0], Load)
    narrow = replace(dot, args=(Cast(replace(dot.args[0], dtype=dtype), F64), dot.args[1]))
    params = tuple(replace(each, dtype=dtype) if each.name == dot.args[0].buffer else each for each in example.params)
    example = replace(example, body=(replace(loop, body=(narrow,)), store), params=params)
    assert "float64" in TARGET.refuses(example)
    compiled = compile_for(load(example, TARGET.emit(example)), H200)
    assert "tl.dot" not in TARGET.emit(example) and "mma" not in compiled.asm["ptx"]


def through_pointers(kernel: Kernel) -> int:
    """Return the columns of a block, if operands are loaded through pointers."""
    form = PointerProduct.applies(Task(kernel, H200, DEFAULT))
    assert not isinstance(form, Refused)
    return form.configs()[0].block("n")


def test_blocks_are_no_wider_than_the_columns_fill() -> None:
    """For 384 columns two blocks of 256 would compute 512, in a product through pointers."""
    widths = {columns: through_pointers(matmul(200704, columns, 288, BF16)) for columns in (384, 512, 700)}
    assert widths == {384: 128, 512: 256, 700: 256}


@compiles
def test_addresses_of_gathered_elements_fit_shared_memory() -> None:
    """The positions are read across, so that the addresses change their layout: 8 bytes for each result."""
    example = gathered_scores(32, 1024, 64, 128)
    config = TARGET.configs(example)[0]
    assert config.block("m") * config.block("n") * 8 <= H200.shared_per_program
    compiled = compile_for(load(example, TARGET.emit(example)), H200)
    assert config.block("m") * config.block("n") * 8 <= compiled.metadata.shared <= H200.shared_per_program


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_three_products_of_one_tall_matrix_take_blocks_that_exist(along: str) -> None:
    """Queries, keys and values of narrow heads: a step of 64 is not divisible by three."""
    tall, deep, columns = 2428, 256, 32
    x = load_expr("x", deep * i + r if along == "rows" else tall * r + i, BF16)
    weights = [load_expr(f"w{n}", deep * j + r, BF16) for n in range(3)]
    dots = [Fold(f"dot{n}", "dot", (x, weight), (r,), F32, (i,), (j,)) for n, weight in enumerate(weights)]
    params = [param("x", BF16, tall * deep), *(param(f"w{n}", BF16, columns, deep) for n in range(3))]
    params += [param(f"out{n}", F32, tall, columns, written=True) for n in range(3)]
    axes = {i: (tall, Role.GRID), j: (columns, Role.GRID), r: (deep, Role.LOOP)}
    stores = [Store(f"out{n}", columns * i + j, dot.ref) for n, dot in enumerate(dots)]
    example = kernel("three", params, axes, Loop((r,), tuple(dots)), *stores)
    configs = TARGET.configs(example)
    assert all(size & (size - 1) == 0 for config in configs for _, size in config.blocks)
    assert "mma" in compile_for(load(example, TARGET.emit(example, configs[0])), H200).asm["ptx"]


def test_contractions_over_other_axes_of_the_grid_are_refused() -> None:
    x, y = load_expr("x", 64 * i + r), load_expr("y", 64 * r + j)
    first, second = (Fold(name, "dot", (x, y), (r,), F32, rows, (j,)) for name, rows in (("p", (i,)), ("q", (b,))))
    params = [param("x", F32, 64, 64), param("y", F32, 64, 64), param("out", F32, 64, 64, 64, written=True)]
    axes = {i: (64, Role.GRID), b: (64, Role.GRID), j: (64, Role.GRID), r: (64, Role.LOOP)}
    store = Store("out", 4096 * b + 64 * i + j, Op("add", (first.ref, second.ref), F32))
    with pytest.raises(Unsupported, match="other axes"):
        TARGET.emit(kernel("unequal", params, axes, Loop((r,), (first, second)), store))


HELD = (("m", 128), ("k", 64), ("n", 64), ("r", 64))


def test_attention_is_one_loop_with_running_values() -> None:
    text = body(online_attention(8, 1024, 1024, 64, dtype=BF16, scale=0.125), Config(HELD, num_warps=8))
    assert (
        text.partition("    for ")[2] == """n0 in range(0, 1024, NBLOCK):
        ni = n0 + tl.arange(0, NBLOCK)
        k = tl.load(k_at[:, None] + (ni * 64)[None, :])
        scores = tl.dot(q, k)
        top_now = _maximum(top, tl.reduce(scores, 1, _maximum))
        mul = top_now * 0.125
        mul_1 = tl.where(mul == -float("inf"), 0.0, mul) * 1.4426950408889634
        exp2 = tl.exp2(scores * 0.18033688011112042 - mul_1[:, None])
        mul_2 = top * 0.125
        where = tl.where(mul_2 == mul, 1.0, tl.exp2((mul_2 - mul) * 1.4426950408889634))
        whole = whole * where + tl.sum(exp2, 1)
        lhs = exp2.to(tl.bfloat16)
        v = tl.load(v_at[None, :] + (ni * 64)[:, None])
        mixed = tl.dot(lhs, v, mixed * where[:, None])
        top = top_now
    tl.store(out_ptr + bi * 65536 + (mi[:, None] * 64 + ri[None, :]), """
        "(mixed * (1.0 / whole)[:, None]).to(tl.bfloat16))"
    )


def test_exponentials_of_exact_kernels_stay_as_they_are() -> None:
    text = body(online_attention(8, 128, 128, 64, dtype=F32))
    assert "libdevice.exp(" in text and "exp2" not in text


@pytest.mark.parametrize(
    ("example", "ranges", "computed"),
    [
        (online_attention(2, 512, 512, 64, causal=True), ["0, n_middle", "n_middle, n_end"], [False, True]),
        (
            online_attention(2, 512, 512, 64, causal=True, hidden=True),
            ["0, n_middle", "n_middle, n_end"],
            [False, True],
        ),
        (online_attention(2, 512, 512, 64, causal=True, window=100), ["n_start, n_end"], [True]),
        (online_attention(2, 512, 512, 64, causal=True, window=100, prefix=20), ["0, n_end"], [True]),
        (online_attention(2, 512, 512, 64), ["0, 512"], [False]),
        (attention_dkv(2, 512, 512, 64, causal=True), ["n_start, n_middle", "n_middle, 512"], [True, False]),
        (attention_dq(2, 512, 512, 64, causal=True), ["0, n_middle", "n_middle, n_end"], [False, True]),
    ],
    ids=["causal", "hidden", "window", "prefix", "full", "dkv", "dq"],
)
def test_blocks_in_which_a_condition_is_false_are_skipped(
    example: Kernel, ranges: list[str], computed: list[bool]
) -> None:
    text = body(example, Config(HELD, split=True))
    assert re.findall(r"in range\((.*), NBLOCK\)", text) == ranges
    conditions = [" <= " in part or " > " in part for part in text.split("    for ")[1:]]
    assert conditions == computed


def test_the_longest_blocks_of_rows_come_first() -> None:
    assert "m_block = m_blocks - 1 - block" in body(online_attention(2, 512, 512, 64, causal=True))
    assert "- 1 - " not in body(online_attention(2, 512, 512, 64))
    assert "- 1 - block" not in body(attention_dkv(2, 512, 512, 64, causal=True))


def test_operands_of_attention_come_through_descriptors_where_rows_are_aligned() -> None:
    described = DescribedConfig(HELD)
    text = body(online_attention(8, 512, 512, 40, dtype=BF16, group=2), described)
    assert "k_ptr + bi // 2 * 20480, [512, 40], [40, 1], [NBLOCK, KBLOCK])" in text
    assert "tl.load(" not in text
    assert "make_tensor_descriptor" not in body(online_attention(8, 512, 512, 36, dtype=BF16), described)
    assert "make_tensor_descriptor" not in TritonTarget("sm_80").emit(online_attention(8, 512, 512, 64), described)


def test_attention_is_priced_by_how_its_operands_come() -> None:
    aligned, odd = (TARGET.efficiency(online_attention(8, 512, 512, width, dtype=BF16)) for width in (64, 36))
    assert 0.25 < odd < aligned < TARGET.efficiency(matmul(4096, 4096, 4096, BF16))


@pytest.mark.parametrize("width", [40, 64, 80, 128, 256])
@pytest.mark.parametrize("result", [online_attention, attention_dkv, attention_dq])
def test_defaults_of_attention_give_each_group_of_warps_at_most_64_rows(
    result: Callable[..., Kernel], width: int
) -> None:
    config = TARGET.configs(result(32, 4096, 4096, width, dtype=BF16))[0]
    groups = config.groups if isinstance(config, WarpSpecialisedConfig) else 1
    assert config.block("m") <= 16 * config.num_warps * groups


def test_a_limit_on_registers_is_passed_on() -> None:
    example = online_attention(8, 512, 512, 64, dtype=BF16)
    assert '"maxnreg": 128' in TARGET.emit(example, Config(HELD, num_warps=8, registers=128))
    assert "maxnreg" not in TARGET.emit(example, Config(HELD, num_warps=8))


def test_two_persistent_programs_may_share_a_multiprocessor() -> None:
    example = matmul(4096, 4096, 1024, BF16)
    assert {each.per_processor for each in TARGET.configs(example) if isinstance(each, PersistentConfig)} == {1, 2}
    single = PersistentConfig((("m", 128), ("k", 64), ("n", 128)), num_warps=8, num_stages=3)
    sources = [load(example, TARGET.emit(example, replace(single, per_processor=count))) for count in (1, 2)]
    assert [source.grid() for source in sources] == [132, 264]
    assert [source.grid(processors=1000) for source in sources] == [1000, 1024]  # there are 1024 blocks


# Ahead of time --------------------------------------------------------------------------------------------------------


def test_float32_products_are_multiplied_as_they_are_where_they_cannot_be_split() -> None:
    example = matmul(256, 256, 256, F32)
    for arch in ("sm_75", "gfx942"):
        assert 'input_precision="ieee"' in TritonTarget(arch).emit(example)


def test_rows_of_transposed_matrices_are_loaded_matrix_by_matrix() -> None:
    example = transposed(64, 768, 384, 200, back=True)
    assert isinstance(TARGET.configs(example)[0], PersistentConfig)
    assert [(dim.name, dim.size) for dim in block(example).dims] == [("b", 64), ("m", 768), ("k", 200), ("n", 384)]
    ptx = compile_for(load(example, TARGET.emit(example)), H200).asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx and "wgmma.mma_async" in ptx


@pytest.mark.parametrize("example", [transposed(64, 64, 384, 200), transposed(64, 768, 384, 196)], ids=["small", "odd"])
def test_small_matrices_and_misaligned_rows_are_one_product(example: Kernel) -> None:
    """Blocks would not be filled, or no descriptor could describe the weight."""
    assert "b" not in {dim.name for dim in block(example).dims}


def test_rows_that_are_one_matrix_already_stay_one() -> None:
    """A block of a linear layer may contain rows of several sequences."""
    plain = matmul(8192, 768, 768, BF16)
    assert {dim.name for dim in block(plain).dims} == {"m", "k", "n"}


def test_blocks_of_fewer_rows_than_a_group_of_warps_multiplies_are_slower() -> None:
    small, parts = matmul(256, 1024, 2048, F32), matmul(256, 1024, 512, F32, batch=4)
    assert TARGET.configs(small)[0].block("m") < 64 <= TARGET.configs(parts)[0].block("m")
    assert TARGET.efficiency(small) < 0.7 * TARGET.efficiency(parts)
    older = TritonTarget("sm_80")
    assert older.efficiency(small) > 0.9 * older.efficiency(parts)


def test_small_blocks_of_a_long_sum_wait_for_the_cache() -> None:
    """H200: 170 µs in 24 × 4 blocks, where the library takes 50 through rows of 8 bytes."""
    long = matmul(384, 196, 49152, BF16, turned=(True, True))
    assert TARGET.efficiency(long) < 0.15
    assert TARGET.efficiency(matmul(4096, 4096, 1024, F32)) > 1.2  # of three products each, by which blocks are bound


@pytest.mark.parametrize(
    ("shape", "block", "warps"),
    [
        ((6272, 384, 768), (64, 128), 4),
        ((12544, 1024, 256), (64, 128), 4),
        ((200704, 64, 256), (64, 64), 4),
        ((6272, 896, 768), (128, 256), 8),  # four blocks, of which one is filled by half, and not seven
        ((4096, 1024, 4096), (128, 256), 8),
    ],
)
def test_rows_that_are_computed_are_short_or_have_few_blocks_of_columns(
    shape: tuple[int, int, int], block: tuple[int, int], warps: int
) -> None:
    """Programs share a multiprocessor, so that one computes while others multiply; blocks of long sums are large, since
    each block of columns computes the rows again.
    """
    example = matmul(*shape, BF16)
    loop, store = example.body
    assert isinstance(loop, Loop)
    (dot,) = loop.body
    assert isinstance(dot, Fold)
    computed = replace(dot, args=(Op("exp", (dot.args[0],), BF16), dot.args[1]))
    (default, *_) = TARGET.configs(replace(example, body=(replace(loop, body=(computed,)), store)))
    assert (default.block("m"), default.block("n"), default.num_warps) == (*block, warps)


@pytest.mark.parametrize(
    ("offset", "share"), [(512 * i, 1.0), (512 * i + FloorDiv(r, 64), 1.0), (512 * i + r + 1, 1.5)]
)
def test_an_operand_of_two_blocks_has_fewer_steps_in_flight(offset: sympy.Expr, share: float) -> None:
    """A number for each row of a step, such as the scale of a group, is no block."""
    example = matmul(4096, 4096, 512, F32)
    (loop, store), target = example.body, TritonTarget("sm_90")
    assert isinstance(loop, Loop)
    (dot,) = loop.body
    assert isinstance(dot, Fold)

    def efficiency(second: sympy.Expr) -> float:
        left = Op("mul", (dot.args[0], load_expr("a", second, F32)), F32)
        made = replace(loop, body=(replace(dot, args=(left, dot.args[1])),))
        return target.efficiency(replace(example, body=(made, store)))

    assert efficiency(sympy.Integer(0)) == pytest.approx(share * efficiency(offset))
