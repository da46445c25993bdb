"""Programs in which one warp loads and two groups compute: which kernels have this form, and that it compiles."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch

from fusion.codegen.chained import GENERATED
from fusion.codegen.target import ChainedForm
from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.devices import WARP_SPECIALISED
from fusion.codegen.triton.file import WAIT
from fusion.codegen.triton.forms.warp_specialised import WarpSpecialisedConfig
from fusion.codegen.triton.forms.warp_specialised.boxes import box_of
from fusion.codegen.triton.forms.warp_specialised.chain import WarpSpecialisedChain, chain_of
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.kernel import Kernel, Store
from tests.codegen.kernels.attention import attention_dkv, attention_dq, online_attention
from tests.codegen.kernels.making import expected, tensors
from tests.codegen.triton import gluon_threads
from tests.codegen.triton.blocking import block

TARGET = TritonTarget("sm_90")
BF16 = torch.bfloat16

TAKEN = {
    "plain": online_attention(2, 1024, 1024, 128, dtype=BF16),
    "causal": online_attention(2, 1024, 1024, 128, dtype=BF16, causal=True),
    "half, 64 wide": online_attention(2, 1024, 1152, 64),
    "window": online_attention(2, 1024, 1024, 64, causal=True, window=300),
    "prefix": online_attention(2, 1024, 1024, 64, causal=True, prefix=100),
    "grouped": online_attention(4, 1024, 1024, 128, dtype=BF16, causal=True, group=2),
    "odd rows": online_attention(2, 1000, 1024, 128, dtype=BF16),
    "odd length": online_attention(2, 1024, 1001, 128, dtype=BF16, causal=True),
    "wide": online_attention(2, 1024, 1024, 256, dtype=BF16),
    "wide, odd, causal": online_attention(2, 1000, 1001, 160, dtype=BF16, causal=True),
    "odd width": online_attention(2, 1024, 1024, 96, dtype=BF16),
}
LEFT = {
    "rows that are not aligned": online_attention(32, 1024, 1024, 100, dtype=BF16),
    "wide": online_attention(32, 1024, 1024, 320, dtype=BF16),
    "float32": online_attention(32, 1024, 1024, 64, dtype=torch.float32),
    "width in a loop": online_attention(32, 1024, 1024, 128, dtype=BF16, step=64),
    "three products": attention_dq(32, 1024, 1024, 128, dtype=BF16),
    "four products": attention_dkv(32, 1024, 1024, 128, dtype=BF16),
}


def specialised(kernel: Kernel) -> Config:
    return next(each for each in TARGET.configs(kernel) if isinstance(each, WarpSpecialisedConfig))


@pytest.mark.parametrize("name", TAKEN)
def test_attention_of_full_blocks_may_be_computed_in_groups(name: str) -> None:
    config = specialised(TAKEN[name])
    assert isinstance(config, WarpSpecialisedConfig) and config.num_warps == 4
    source = TARGET.emit(TAKEN[name], config)
    assert source.count("@gluon.jit") == 5 and "tl.arange(" not in source


@pytest.mark.parametrize("name", ["causal", "window", "wide"])
def test_no_key_loop_is_inside_a_loop_of_its_function(name: str) -> None:
    """Triton reads the body of a loop twice, each time that it reads the enclosing lines."""
    heads = online_attention(64, 4096, 4096, 128, dtype=BF16, causal=True) if name == "causal" else TAKEN[name]
    functions = [
        each for each in ast.parse(TARGET.emit(heads, specialised(heads))).body if isinstance(each, ast.FunctionDef)
    ]
    nests = {function.name: _depth(function) for function in functions}
    walks = {name: depth for name, depth in nests.items() if name.endswith("_block")}
    assert walks == {"attention_fetch_block": 1, "attention_compute_block": 1}
    assert nests["attention_compute"] == (2 if name == "causal" else 1), "sections of heads, and turns"


@pytest.mark.parametrize("name", TAKEN)
def test_a_function_takes_what_it_reads(name: str) -> None:
    tree = ast.parse(TARGET.emit(TAKEN[name], specialised(TAKEN[name])))
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.decorator_list]
    defined = {each.name for each in functions} | {"tl", "gl", "hopper", "range", "float", WAIT}
    for function in functions:
        names = [node for line in function.body for node in ast.walk(line) if isinstance(node, ast.Name)]
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        takes = {each.arg for each in function.args.args}
        assert read <= takes | {node.id for node in names if isinstance(node.ctx, ast.Store)} | defined
        assert takes <= read or not function.name.endswith("_block")


def _depth(node: ast.AST) -> int:
    inside = max((_depth(each) for each in ast.iter_child_nodes(node)), default=0)
    return inside + isinstance(node, ast.For)


@pytest.mark.parametrize("name", LEFT)
def test_kernels_outside_the_form_are_left_to_triton(name: str) -> None:
    assert not any(isinstance(config, WarpSpecialisedConfig) for config in TARGET.configs(LEFT[name]))
    assert isinstance(chain_of(block(LEFT[name])), str)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_other_architectures_have_no_groups(arch: str) -> None:
    assert not any(isinstance(each, WarpSpecialisedConfig) for each in TritonTarget(arch).configs(TAKEN["plain"]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("wide", "heads are 320 and 320 wide"),
        ("rows that are not aligned", "its matrices are not of 16 bits, or do not lie evenly in memory"),
        ("three products", "its loop has 3 products, not two"),
    ],
)
def test_reasons_are_given(name: str, why: str) -> None:
    assert TARGET.forms(LEFT[name]) == (ChainedForm(GENERATED), ChainedForm(WARP_SPECIALISED, why))
    assert [form.name for form in TARGET.forms(FASTER["wide"][0])] == [WARP_SPECIALISED, GENERATED]
    assert TritonTarget("sm_80").forms(LEFT[name]) == (ChainedForm(GENERATED),), (
        "where there are no groups, nothing is said"
    )


FASTER = {
    "wide": (online_attention(32, 1024, 1024, 128, dtype=BF16), True),
    "wide, causal": (online_attention(32, 4096, 4096, 128, dtype=BF16, causal=True), True),
    "narrow": (online_attention(32, 2048, 2048, 64, dtype=BF16), True),
    "narrow, causal": (online_attention(32, 4096, 4096, 64, dtype=BF16, causal=True), False),
    "short walks": (online_attention(64, 384, 384, 128, dtype=BF16), False),
    "short walks, narrow": (online_attention(64, 512, 512, 64, dtype=BF16), False),
    "shorter walks": (online_attention(64, 512, 512, 128, dtype=BF16, causal=True), True),
    "few blocks": (online_attention(2, 1024, 1024, 128, dtype=BF16), False),
}


@pytest.mark.parametrize("name", FASTER)
def test_groups_are_the_default_where_they_are_faster(name: str) -> None:
    kernel, faster = FASTER[name]
    first, *_ = configs = TARGET.configs(kernel)
    assert isinstance(first, WarpSpecialisedConfig) is faster
    assert any(isinstance(config, WarpSpecialisedConfig) for config in configs)


def test_a_result_in_the_memory_of_an_operand_is_left_to_triton() -> None:
    """Other programs would still read the elements that are overwritten."""
    kernel = TAKEN["plain"]
    body = tuple(replace(stmt, param="q") if isinstance(stmt, Store) else stmt for stmt in kernel.body)
    assert isinstance(chain_of(block(kernel)), WarpSpecialisedChain)
    assert isinstance(chain_of(block(replace(kernel, body=body))), str)


@pytest.mark.parametrize("name", ["plain", "half, 64 wide", "wide, odd, causal"])
def test_it_compiles_without_a_device(name: str) -> None:
    kernel = TAKEN[name]
    stages = dict(TARGET.stages(kernel, TARGET.emit(kernel, specialised(kernel)), "sm_90"))
    assert list(stages) == ["ttgir", "llir", "ptx", "cubin", "sass"]
    ptx = stages["ptx"]
    assert isinstance(ptx, str)
    assert "setmaxnreg.inc" in ptx and "wgmma.mma_async" in ptx and "cp.async.bulk.tensor.3d" in ptx
    assert "wgmma.wait_group.sync.aligned 1;" in ptx  # one product may run on


def test_messages_wait_for_all_warps_of_a_group() -> None:
    """One thread sends each message, after all warps of its group have reached the same point."""
    kernel = TAKEN["half, 64 wide"]
    lines = str(dict(TARGET.stages(kernel, TARGET.emit(kernel, specialised(kernel)), "sm_90"))["ptx"]).splitlines()
    sent = [number for number, line in enumerate(lines) if "mbarrier.arrive.shared" in line]
    assert sent
    for number in sent:
        before = [line for line in lines[:number] if "bar.sync" in line or "mbarrier." in line or "wgmma." in line]
        assert "bar.sync" in before[-1]


WALKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 200},
    "narrow window": {"causal": True, "window": 3},
    "prefix": {"causal": True, "prefix": 100},
    "grouped": {"causal": True, "group": 3},
}


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("loop", WALKS)
def test_threads_agree_with_the_evaluator(loop: str, width: int) -> None:
    """Nine blocks on two programs: slots, phases and turns wrap around."""
    assert_same(online_attention(3, 384, 384, width, scale=width**-0.5, **WALKS[loop]))


@pytest.mark.parametrize("keys", [128, 256, 640])
def test_loops_of_any_number_of_blocks(keys: int) -> None:
    assert_same(online_attention(3, 256, keys, 64, scale=0.125, dtype=BF16))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("loop", WALKS)
def test_any_number_of_groups(loop: str, count: int) -> None:
    """Blocks of 192 rows reach past the end of 448, and past 256 columns, where they have one block fewer."""
    kernel = online_attention(3, 448, 512, 64, scale=0.125, **WALKS[loop])
    config = next(each for each in TARGET.configs(kernel) if getattr(each, "groups", 0) == count)
    assert_same(kernel, TARGET.emit(kernel, config))


def test_masked_blocks_are_processed_first() -> None:
    """Only the last block of a row is masked; as the first of the loop it needs no mask inside."""
    kernel = TAKEN["causal"]
    compute = TARGET.emit(kernel, specialised(kernel)).partition("def attention_compute_block(")[2]
    assert compute.count("warpgroup_mma_wait(1,") == 1 and compute.count("<= mi[:, None]") == 1
    shifted = online_attention(16, 1088, 1152, 128, dtype=BF16, causal=True)
    compute = TARGET.emit(shifted, specialised(shifted)).partition("def attention_compute_block(")[2]
    assert compute.count("warpgroup_mma_wait(1,") == 2, "rows that see 64 more columns have two such blocks"


@pytest.mark.parametrize(
    ("rows", "keys", "width"), [(300, 391, 64), (391, 300, 64), (100, 130, 128), (130, 70, 96), (300, 100, 136)]
)
@pytest.mark.parametrize("loop", WALKS)
def test_lengths_and_widths_that_are_not_multiples_of_blocks(loop: str, rows: int, keys: int, width: int) -> None:
    """Elements past an end are not read, or are masked: they belong to other heads, and scores far below 0."""
    kernel = online_attention(3, rows, keys, width, scale=0.125, **WALKS[loop])
    assert_same(kernel, below=8.0)


HEADS, ROWS, KEYS = (sympy.Symbol(name, integer=True, positive=True) for name in ("heads", "rows", "keys"))


@pytest.mark.parametrize("sizes", [{ROWS: 300}, {HEADS: 3, ROWS: 300, KEYS: 391}, {KEYS: 64}])
def test_sizes_that_are_not_known(sizes: dict[sympy.Symbol, int]) -> None:
    rows = ROWS if ROWS in sizes else 200
    keys = KEYS if KEYS in sizes else rows
    heads = HEADS if HEADS in sizes else 3
    kernel = online_attention(heads, rows, keys, 64, scale=0.125, causal=keys is rows)  # type: ignore[arg-type]
    assert_same(kernel, sizes=sizes)


@pytest.mark.parametrize("together", [2, 3, 4])
@pytest.mark.parametrize("programs", [2, 3, 5])
def test_heads_that_fit_the_cache_together_are_done_one_section_after_the_other(together: int, programs: int) -> None:
    kernel = online_attention(5, 400, 400, 64, scale=0.125, causal=True)
    config = replace(specialised(kernel), group=together)
    assert_same(kernel, TARGET.emit(kernel, config), programs=programs)


def test_programs_process_about_equally_many_blocks() -> None:
    """Of 64 heads of 4096 rows, 16 of which fit the cache together: 512 blocks for 132 programs, four times."""
    source = TARGET.emit(online_attention(64, 4096, 4096, 128, dtype=BF16, causal=True))
    text = "\n".join(section for section in source.split("\n\n\n") if section.startswith("@triton.jit\ndef _zigzag"))
    looped = []
    for program in range(132):
        language = SimpleNamespace(num_programs=lambda _: 132, program_id=lambda _, program=program: program)
        language.where = lambda condition, a, b: a if condition else b
        names: dict[str, Any] = {"tl": language, "triton": SimpleNamespace(jit=lambda function: function)}
        exec(text, names)
        turns = [(turn, section) for section in range(4) for turn in range(names["_zigzag_turns"](512, section))]
        looped.append(sum(32 - names["_zigzag"](turn, section) // 16 for turn, section in turns))
    assert max(looped) <= 1.02 * sum(looped) / 132


def assert_same(
    kernel: Kernel,
    source: str | None = None,
    *,
    sizes: dict[sympy.Symbol, int] | None = None,
    programs: int = 2,
    below: float = 0.0,
) -> None:
    args = tensors(kernel, sizes=sizes)
    args[0] -= below * args[1].mean((0, 1)).sign()
    given = [(sizes or {})[size] for size in kernel.sizes]
    want = expected(kernel, args, given)
    gluon_threads.run(kernel, source or TARGET.emit(kernel, specialised(kernel)), args, programs, given)
    near = 2e-3 if args[-1].dtype is torch.float16 else 1.6e-2
    torch.testing.assert_close(args[-1], want[-1], rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("hopper.warpgroup_mma_wait(1, deps=(next_scores,))", "hopper.warpgroup_mma_wait(2, deps=(next_scores,))"),
        ("hopper.warpgroup_mma_wait(0, deps=(next_sums,))", "hopper.warpgroup_mma_wait(1, deps=(next_sums,))"),
        ("hopper.mbarrier.arrive(other_emptied.index(behind), count=1)", "pass"),
        ("hopper.mbarrier.arrive(right_emptied.index(slot), count=1)", "pass"),
    ],
)
def test_threads_notice_a_wait_or_a_message_that_is_missing(
    line: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_threads, "PATIENCE", 1.0)
    kernel = online_attention(3, 384, 640, 64, scale=0.125)
    source = TARGET.emit(kernel, specialised(kernel))
    assert line in source
    with pytest.raises((AssertionError, AttributeError, TypeError)):  # sums that are not there have no methods
        assert_same(kernel, source.replace(line, instead))


def test_a_matrix_is_located_within_its_parameter() -> None:
    """One of three, of a head, of a batch: queries, keys and values side by side."""
    kernel = online_attention(16, 1024, 1024, 128, dtype=BF16)
    param = replace(kernel.params[0], shape=(2, 1024, 3, 8, 128), strides=(3145728, 3072, 1024, 128, 1))
    kernel = replace(kernel, params=(param, *kernel.params[1:]))
    blocked = block(kernel)
    chain = chain_of(block(kernel))
    assert isinstance(chain, WarpSpecialisedChain)
    batch = next(dim for dim in blocked.dims if dim.name == "b").symbol
    base = 3145728 * FloorDiv(batch, 8) + 128 * Mod(batch, 8) + 1024
    matrix = replace(chain.left.matrix, stride=sympy.Integer(3072), base=base)
    result = box_of(blocked, matrix)
    assert result is not None and result.start == 1024
    assert {(index, int(count), int(step)) for index, count, step in result.outer} == {
        (FloorDiv(batch, 8), 2, 3145728),
        (Mod(batch, 8), 8, 128),
    }
    assert box_of(blocked, replace(matrix, base=base - 256 * batch)) is None  # no descriptor goes backwards
