"""Decisions of a launch on the host, without a GPU: the binary for its pointers, and the memory of its counts."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch

pytest.importorskip("triton")

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.devices import H200
from fusion.codegen.triton.launch import build, counters, direct, preparations
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.host_descriptors import DescriptorCache
from fusion.codegen.triton.launch.launchers import BinaryRequirements, Either, launcher, promise
from fusion.codegen.triton.launch.load import load, signature
from fusion.codegen.triton.launch.multiples import sizes_that_matter
from fusion.codegen.triton.launch.sources import Sources, unaligned
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel, Role
from tests.codegen.kernels.making import BF16, F32, param
from tests.codegen.kernels.pointwise import add
from tests.codegen.kernels.products import gated, matmul
from tests.codegen.kernels.rows import softmax
from tests.codegen.triton.launches import At, Recorded
from tests.codegen.triton.texts import TARGET, compiles


@pytest.mark.usefixtures("now")
def test_a_launch_takes_the_binary_that_its_pointers_allow() -> None:
    ready, kernel = Recorded(), add(64)
    launch = launcher(ready, kernel)
    for addresses in ((16, 32, 0), (16, 36, 64), (160, 32, 48), (4, 8, 2)):
        launch(*map(At, addresses))
    assert ready.launched == [(True, 7, 16, 32, 0), (False, 9, 16, 36, 64), (True, 7, 160, 32, 48), (False, 9, 4, 8, 2)]
    assert ready.built == [(True,), (False,)]  # each once, when first needed

    ready = Recorded()
    launch = launcher(ready, add(sympy.Symbol("s0", integer=True, positive=True)))
    for address, size in ((16, 32), (16, 33), (20, 32), (32, 64), (32, 1024)):
        launch(At(address), At(32), At(48), size)
    assert ready.built == [(True, True), (True, False), (False, True), (True, True), (True, True, "wide")]
    assert [call[0] for call in ready.launched] == [True, True, False, True, True]


@pytest.mark.usefixtures("now")
def test_a_launch_that_is_refused_goes_another_way() -> None:
    class Refusing(Recorded):
        def run(self, wanted: BinaryRequirements) -> tuple[Callable[[int, list[int]], None], Any]:
            if not wanted.aligned:
                raise BuildError("too much shared memory")
            return super().run(wanted)

    for size in (64, sympy.Symbol("s0", integer=True, positive=True)):
        ready, others, kernel = Refusing(), list[Sequence[Any]](), add(size)
        either = Either(partial(launcher, ready, kernel))
        sizes = [64] * len(kernel.sizes)
        aligned, unaligned = [At(16), At(32), At(48), *sizes], [At(20), At(32), At(48), *sizes]
        for raises in (either, either.or_else(None)):
            with pytest.raises(BuildError):
                raises(*unaligned)
        launch = either.or_else(lambda refusal, args, others=others: others.append(args))
        for args in (aligned, unaligned, aligned, unaligned):
            launch(*args)
        assert len(ready.launched) == 2 and others == [tuple(unaligned)] * 2


def test_sizes_that_only_count_rows_have_one_binary() -> None:
    rows, length = sympy.symbols("s0 s1", integer=True, positive=True)

    def sizes_in_key(kernel: Kernel) -> set[sympy.Symbol]:
        return {size for size, tells in zip(kernel.sizes, sizes_that_matter(kernel), strict=True) if tells}

    assert not sizes_in_key(softmax(rows, 768, Role.WHOLE)) and not sizes_in_key(matmul(rows, 768, 2304, BF16))
    assert sizes_in_key(softmax(rows, length, Role.LOOP)) == {length}  # where rows begin, and how long they are
    assert sizes_in_key(matmul(rows, length, 2304, BF16)) == {length}
    assert sizes_in_key(add(length)) == {length} and not sizes_in_key(add(48 * length))


def test_launches_that_may_overlap_have_separate_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    now, launched = {"stream": 1, "capturing": False}, []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    monkeypatch.setattr(counters, "reserve", lambda device, count: None)
    monkeypatch.setattr(counters, "_free", {0: range(400, 440, 4)})
    run, _ = counters.counted(lambda programs, args: launched.append(args[-1]), 0)
    for stream, capturing in ((1, False), (1, False), (2, False), (1, True), (1, True), (2, False), (1, False)):
        now.update(stream=stream, capturing=capturing)
        run(8, [16, 32])
    first, again, other, captured, next_captured, *last = launched
    assert first == again and last == [other, first]
    assert len({first, other, captured, next_captured}) == 4


def test_launches_that_count_tiles_have_a_row_of_counters_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_free", {0: range(400, 440, 4)})
    assert [counters.take(0, count) for count in (4, 1, 4, 5, 1)] == [400, 416, 420, None, 436]


def test_counters_are_allocated_by_a_thread_that_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations of the capturing thread belong to the pool of its CUDA graph."""
    threads: list[int] = []

    def zeros(device: int, count: int) -> torch.Tensor:
        threads.append(threading.get_ident())
        return torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(counters, "_zeros", zeros)
    monkeypatch.setattr(counters, "_free", {})
    monkeypatch.setattr(counters, "_memory", [])
    counters.reserve(1)
    counters.reserve(1)
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    assert counters.take(1) != counters.take(1)


@compiles
def test_builds_wait_for_the_threads_that_prepare_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton hashes itself and builds its driver there, once for all builds; otherwise each build would do so.  Only
    launches wait for the driver.
    """
    begun: list[str] = []
    going, compiled = threading.Event(), threading.Event()

    def triton_key() -> None:
        going.wait(60)
        begun.append(threading.current_thread().name)

    class Driver:
        @property
        def active(self) -> None:
            begun.append(threading.current_thread().name)
            raise RuntimeError("no device")

    def build() -> None:
        compile_for(load(add(64), TARGET.emit(add(64))), H200)
        compiled.set()

    monkeypatch.setattr(preparations, "triton_key", triton_key)
    monkeypatch.setattr(preparations, "driver", Driver())
    preparations.start.cache_clear()
    TARGET.prepare()
    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not compiled.wait(0.5) and begun == ["fusion-triton-driver"]
    going.set()
    for thread in threads:
        thread.join()
    assert compiled.is_set() and begun == ["fusion-triton-driver", "fusion-triton-hash"]
    preparations.start.cache_clear()


def test_a_missing_compiler_is_reported_as_slower_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("no C compiler was found\nset CC")

    monkeypatch.setattr(direct, "compile_module_from_src", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    direct._compiled.cache_clear()
    try:
        assert direct.stub() is None
        assert TritonTarget("sm_90").missing_tools().endswith("cannot be compiled (no C compiler was found)")
    finally:
        direct._compiled.cache_clear()


def test_the_stub_that_passes_descriptors_is_compiled_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would compile this stub at the first launch; kernels without descriptors need no stub of Triton's."""
    stubs: list[Any] = []

    active = SimpleNamespace(launcher_cls=lambda src, metadata: stubs.append((src, metadata)))
    monkeypatch.setattr(build, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(build, "compile_for", lambda source, *_, **__: SimpleNamespace(src=source.kernel, metadata=1))
    monkeypatch.setattr(build, "device_at", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for result in (add(64), matmul(2048, 2048, 2048, BF16)):
        build.build(result, TARGET.emit(result), TARGET.emit)
    assert stubs == [(result, 1)]


def test_only_promised_pointers_must_be_aligned() -> None:
    kept = promise([param("x", F32, 8), param("y", F32, 8, aligned=False)])
    assert kept([32, 16]) and kept([32, 4]) and not kept([36, 16])
    assert promise([])([])


def test_one_descriptor_reaches_only_tensors_that_are_near() -> None:
    apart = promise([param("x", F32, 8), param("y", F32, 8)], near=True)
    assert apart([1 << 41, (1 << 41) + 64]) and not apart([1 << 41, 64]) and not apart([32, 36])
    target = TritonTarget("sm_90")
    for turned in (True, False):  # weights in rows are fetched as one matrix
        kernel = gated(4096, 1024, 512, turned=turned)
        assert load(kernel, target.emit(kernel)).near is turned


def test_unaligned_tensors_are_not_fetched_through_descriptors() -> None:
    target, example = TritonTarget("sm_90"), matmul(2048, 2048, 2048, BF16)
    emitted: list[Kernel] = []

    def emit(kernel: Kernel, *, wide: bool) -> str:
        emitted.append(kernel)
        return target.emit(kernel, wide=wide)

    sources = Sources(load(example, target.emit(example)), emit)
    assert sources.of(True).persistent and not emitted
    assert not sources.of(False).persistent and sources.of(False) is sources.of(False)
    assert emitted == [unaligned(example)]
    # An edited source serves any tensor, if it can.
    plain = load(add(64), target.emit(add(64)))
    assert Sources(plain, emit).of(False) is plain


def test_unaligned_tensors_are_not_read_in_words() -> None:
    """If a row begins within a word, the rest of the word after its end may be on another page."""
    target, kernel = TritonTarget("sm_90"), softmax(1, 3001, Role.LOOP)
    sources = Sources(load(kernel, target.emit(kernel)), target.emit)
    aligned, unaligned = (inspect.getsource(sources.of(kept).module) for kept in (True, False))
    assert "ri < 3004" in aligned and "ri < 3004" not in unaligned


def test_sizes_decide_how_wide_indices_are() -> None:
    """Within the limit that a kernel states, all indices have 32 bits; beyond, it is generated again."""
    target, rows = TritonTarget("sm_90"), sympy.Symbol("s0", integer=True, positive=True)
    kernel = matmul(rows, 768, 50257, BF16)
    generated = load(kernel, target.emit(kernel))
    assert "int64" not in target.emit(kernel) and signature(generated)["s0"] == "i32"
    assert generated.fits(8192) and generated.fits(2**31 // 50257 - 1024) and not generated.fits(2**31 // 50257 + 1)
    sources = Sources(generated, target.emit)
    assert not sources.wide(True, [8192]) and sources.wide(True, [50_000]) and sources.wide(False, [50_000])
    beyond = sources.of(True, True)
    assert not beyond.limited and beyond.fits(50_000) and signature(beyond)["s0"] == "i64"
    assert not load(add(64), target.emit(add(64))).limited


@compiles
def test_descriptors_are_created_once_for_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch creates only the descriptors of addresses that it has not seen."""
    results: list[tuple[int, tuple[int, ...]]] = []

    def make(described: Any, form: object) -> list[object]:
        results.append((described.base.data_ptr(), tuple(described.shape)))
        return [described.base.data_ptr()]

    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "make_tensordesc_arg", make, raising=False)
    rows = sympy.Symbol("s0", integer=True, positive=True)
    kernel = matmul(rows, 768, 512, BF16)
    generated = load(kernel, TARGET.emit(kernel))
    given = DescriptorCache(kernel, generated.module, [None] * len(generated.descriptor_types))
    assert given([64, 128, 256, 4096]) == [64, 128, 256] == given([64, 128, 256, 4096])
    assert results == [(64, (4096, 512)), (128, (512, 768)), (256, (4096, 768))]
    assert given([512, 128, 256, 4096]) == [512, 128, 256] and results[3:] == [(512, (4096, 512))]
    assert given([64, 128, 256, 2048]) == [64, 128, 256] and len(results) == 7
