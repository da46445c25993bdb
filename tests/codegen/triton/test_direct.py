"""Launches from tensors to the driver in one call, with a stand-in for the driver's function."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch

pytest.importorskip("triton")

from fusion.codegen.triton.devices import H200
from fusion.codegen.triton.launch import direct
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.direct import LoadedBinary, run_of, stub
from fusion.codegen.triton.launch.launchers import launcher
from fusion.codegen.triton.launch.load import load, signature
from fusion.lowering.ir.kernel import Role
from tests.codegen.kernels.pointwise import add
from tests.codegen.kernels.rows import softmax, total
from tests.codegen.triton.launches import At, Recorded
from tests.codegen.triton.texts import TARGET, compiles

pytestmark = pytest.mark.skipif(stub() is None, reason="needs a C compiler and Python's headers")


class _Config(ctypes.Structure):
    """The driver's structure of a launch, without its arguments."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("how", ctypes.c_void_p),
        ("ways", ctypes.c_uint),
    )


class _Driver:
    """Stands in for the driver's launch function: records its calls, each with a given number of arguments."""

    def __init__(self, count: int) -> None:
        self.launched: list[tuple[object, ...]] = []
        self.result: int | Callable[[], int] = 0

        def launch(config: Any, function: int, params: Any, extra: int | None) -> int:
            (given,) = config
            self.launched.append((*given.grid, *given.block, given.shared, given.stream, given.ways, function))
            self.args = [params[k][0] for k in range(count)]
            assert extra is None
            return self.result() if callable(self.result) else self.result

        pointers = ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_void_p, pointers, ctypes.c_void_p)
        self._kept = kind(lambda config, *rest: launch([config[0]], *rest))
        self.entry = ctypes.cast(self._kept, ctypes.c_void_p).value or 0


def test_an_ordinary_launch_is_one_call_of_the_driver(now: dict[str, int]) -> None:
    """This holds from the second launch on; unusual launches are looked up."""
    size = sympy.Symbol("s0", integer=True, positive=True)
    for kernel in (add(64), add(size)):
        sizes = [64] * len(kernel.sizes)
        ready, driver = Recorded(), _Driver(3 + len(sizes) + 2)
        ready.binary = LoadedBinary(0, driver.entry, 1234, 128, 512, 0, dependent=True, cooperative=False)
        launch = launcher(ready, kernel)
        for address in (16, 32, 48):
            launch(At(address), At(64), At(80), *sizes)
            now["stream"] = address
        assert ready.launched == [(True, 7, 16, 64, 80, *sizes)]
        assert driver.launched == [(7, 1, 1, 128, 1, 1, 512, stream, 1, 1234) for stream in (16, 32)]
        assert driver.args == [48, 64, 80, *sizes, 0, 0]

        launch(At(20), At(64), At(80), *sizes)
        now["device"] = 1
        launch(*(At(address, 1) for address in (16, 64, 80)), *sizes)
        now.update(device=0, stream=7)
        driver.result = 1
        launch(At(16), At(64), At(96), *sizes)
        expected = (False, 9, 20, 64, 80), (True, 7, 16, 64, 80), (True, 7, 16, 64, 96)
        assert ready.launched[1:] == [(*call, *sizes) for call in expected] and len(driver.launched) == 3


@pytest.mark.usefixtures("now")
def test_a_direct_launch_in_a_thread_without_a_device_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; the thread then has the device of the launch."""
    entered: list[int] = []
    monkeypatch.setattr(direct, "_enter", entered.append)
    driver = _Driver(5)
    binary = LoadedBinary(0, driver.entry, 1234, 64, 0, 0, dependent=False, cooperative=False)

    class Loaded(Recorded):
        def run(self, *wanted: Any) -> tuple[Callable[[int, list[int]], None], LoadedBinary]:
            return run_of(binary, lambda size: pytest.fail("it takes no memory")), binary

    launch, given = launcher(Loaded(), add(64)), [At(16 * k) for k in range(1, 4)]
    launch(*given)
    driver.result = lambda: 0 if entered else 201
    launch(*given)  # directly, looked up, and again
    assert entered == [0] and len(driver.launched) == 1 + 3
    launch(*given)
    assert entered == [0] and len(driver.launched) == 1 + 3 + 1


@compiles
def test_only_kernels_with_the_parameters_of_a_direct_launch_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Utils:
        def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
            assert kernel[:4] == b"\x7fELF"
            return 1, 1234, 32, 0, 1024

    monkeypatch.setattr(direct, "_entry", lambda: 99)
    monkeypatch.setattr(direct, "driver", SimpleNamespace(active=SimpleNamespace(utils=Utils())))
    rows = sympy.Symbol("s0", integer=True, positive=True)
    for kernel, given in ((add(64), 3), (softmax(rows, 768, Role.WHOLE), 3), (total(1 << 16, 64), 4)):
        generated = load(kernel, TARGET.emit(kernel))
        compiled = compile_for(generated, H200, (False,) * len(kernel.sizes))
        assert given == len(signature(generated)) - len(generated.constants)
        binary = direct.loaded(compiled, 0, given)
        assert binary is not None and (binary.function, binary.entry) == (1234, 99)
        assert binary.threads == 32 * generated.options["num_warps"] and binary.shared == compiled.metadata.shared
        assert direct.loaded(compiled, 0, given - 1) is None


def test_launches_that_count_are_direct_where_their_counters_are_known(
    now: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream has counters of its own, and so has each launch that is captured."""
    captured = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured[0])
    kernel = total(1 << 16, 64)
    ready, driver = Recorded(), _Driver(6)
    known = {7: 4096}
    ready.binary = LoadedBinary(0, driver.entry, 1234, 128, 0, 0, dependent=False, cooperative=False, counters=known)
    launch, given = launcher(ready, kernel), [At(16 * k) for k in range(1, 4)]
    launch(*given)  # loads
    launch(*given)
    assert driver.args == [16, 32, 48, 4096, 0, 0]
    now["stream"] = 8
    launch(*given)  # finds counters
    known[8] = 8192
    launch(*given)
    assert driver.args == [16, 32, 48, 8192, 0, 0]
    captured[0] = True
    launch(*given)
    assert len(driver.launched) == 2 and len(ready.launched) == 3


def test_launches_that_are_looked_up_reach_the_driver(now: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(4)
    binary = LoadedBinary(1, driver.entry, 1234, 64, 0, 8, dependent=False, cooperative=True)
    memory: list[int] = []

    def allocate(size: int) -> Any:
        memory.append(size)
        return At(4096)

    run = run_of(binary, allocate)
    run(0, [16, 32])
    run(3, [16, 32])
    assert driver.launched == [(3, 1, 1, 64, 1, 1, 0, 107, 1, 1234)] and driver.args == [16, 32, 4096, 0]
    assert memory == [24]
    driver.result = 1
    monkeypatch.setattr(direct, "_text", str)
    with pytest.raises(RuntimeError, match="refuses a launch: 1"):
        run(3, [16, 32])


@pytest.mark.usefixtures("now")
def test_a_thread_without_a_device_is_given_that_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of autograd may have none, where backward launches a kernel that forward has loaded."""
    driver, entered = _Driver(4), list[int]()
    driver.result = direct.NO_CONTEXT

    def enter(device: int) -> None:
        entered.append(device)
        driver.result = 0

    monkeypatch.setattr(direct, "_enter", enter)
    run = run_of(
        LoadedBinary(1, driver.entry, 1234, 64, 0, 0, dependent=False, cooperative=False), lambda size: At(size)
    )
    run(3, [16, 32])
    run(3, [16, 32])
    assert entered == [1] and len(driver.launched) == 3
