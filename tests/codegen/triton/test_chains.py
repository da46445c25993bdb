"""The block of a program of a chained product, and its configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion.codegen.numerics import DEFAULT
from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.devices import H200
from fusion.codegen.triton.forms import Task
from fusion.codegen.triton.forms.chained import Chained, DescribedConfig
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.kernels.attention import attention_dkv, attention_dq, online_attention
from tests.codegen.kernels.making import BF16

TARGET = TritonTarget("sm_90")


def chained(kernel: Kernel) -> Chained:
    return Chained(Task(kernel, H200, DEFAULT))


def pipelined(kernel: Kernel) -> Config:
    """The first configuration of the form that Triton pipelines."""
    return next(config for config in TARGET.configs(kernel) if type(config) is Config)


@pytest.mark.parametrize("make", [online_attention, attention_dq, attention_dkv])
def test_heads_that_fit_the_cache_take_their_blocks_in_turn(make: object) -> None:
    kernel: Kernel = make(32, 1024, 1024, 64, causal=True)  # type: ignore[operator]
    config = pipelined(kernel)
    assert config.group == 32
    source = TARGET.emit(kernel, config)
    assert "block = pid // 32" in source and "bi = pid % 32" in source


@pytest.mark.parametrize("make", [attention_dq, attention_dkv])
def test_gradients_of_masked_heads_take_their_blocks_in_turn(make: object) -> None:
    """H200, two times eight heads of 4096 by 128: 201 and 316 µs; for keys and values head by head 427."""
    kernel: Kernel = make(16, 4096, 4096, 128, dtype=BF16, causal=True)  # type: ignore[operator]
    assert TARGET.configs(kernel)[0].group > 1


def test_longer_loops_share_the_cache_in_equal_groups() -> None:
    kernel = online_attention(30, 16384, 16384, 64, causal=True)  # 4 MiB of keys and values per head, of 32
    config = pipelined(kernel)
    assert config.group == 8  # 8, 8, 8 and 6
    lines = TARGET.emit(kernel, config)
    assert "batch, block = tl.swizzle2d(pid // m_blocks, pid % m_blocks, 30, m_blocks, 8)" in lines
    assert {each.group for each in chained(kernel).configs() if isinstance(each, DescribedConfig)} == {1}


def test_loops_of_equal_length_run_head_by_head() -> None:
    kernel = online_attention(32, 1024, 1024, 64)
    assert {each.group for each in chained(kernel).configs()} == {1}
    assert "bi = pid // m_blocks" in TARGET.emit(kernel, pipelined(kernel))


@pytest.mark.parametrize(("heads", "group"), [(7, 3), (8, 4), (3, 64)])
def test_every_block_is_computed_once(heads: int, group: int) -> None:
    """The order of programs, as the source computes it."""
    kernel = online_attention(heads, 640, 640, 64, causal=True)
    config = replace(pipelined(kernel), group=group)
    blocks = 640 // config.block("m")
    source = TARGET.emit(kernel, config)
    lines = [line.strip() for line in source.splitlines()]
    start = lines.index("pid = tl.program_id(0)")
    stop = next(i for i, line in enumerate(lines) if line.startswith("m0 = "))
    place = "\n".join(lines[start + 1 : stop + 1])

    def swizzle2d(i: int, j: int, rows: int, columns: int, group: int) -> tuple[int, int]:
        number, first = i * columns + j, (i * columns + j) // (group * columns) * group
        size, rest = min(rows - first, group), number - first * columns
        return first + rest % size, rest // size

    class Language:
        cdiv = staticmethod(lambda a, b: -(-a // b))

    Language.swizzle2d = staticmethod(swizzle2d)  # type: ignore[attr-defined]
    seen, works = set(), []
    for pid in range(heads * blocks):
        names: dict[str, object] = {"pid": pid, "tl": Language, "MBLOCK": config.block("m"), "NBLOCK": 64}
        exec(place, names)
        head = names["batch"] if "batch" in names else pid % heads
        seen.add((head, names["m0"]))
        works.append(names["m0"])
    assert len(seen) == heads * blocks == len(works)
    assert works[: min(group, heads)] == [640 - config.block("m")] * min(group, heads)  # the longest of each come first


@pytest.mark.parametrize(("columns", "warps"), [(49, 4), (4096, 8)])
def test_few_rows_take_few_warps_unless_a_loop_waits_for_its_loads(columns: int, warps: int) -> None:
    """H200, 12288 windows of 49 × 49: 55 µs with 4 warps, 82 with 8."""
    assert pipelined(online_attention(12288, 49, columns, 32, dtype=BF16)).num_warps == warps
