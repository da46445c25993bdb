"""Shared fixtures: a seed, a private cache, two threads, a clean Dynamo, and the `gpu` marker."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

import pytest

# Two workers with two threads each share two cores: a thread that waits for the others should not spin meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read where PyTorch loads its run time library
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, for small tiles under Triton's interpreter

import torch

from tests.slow_tests import PLUGIN, SlowTests
from tests.torch_logs import leave_out_logs

DAYS_KEPT = 14
"""Days after which an object of the C compiler is removed from pytest's cache."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--refresh-goldens`, which rewrites the recorded decisions in `tests/golden/`, `--refresh-documents`, which
    rewrites the outputs of the documentation's code blocks, and `--refresh-slow-tests`, which rewrites the list of slow
    tests (`tests/slow_tests.py`).
    """
    parser.addoption("--refresh-goldens", action="store_true", help="write the texts of tests/golden/ anew")
    parser.addoption("--refresh-documents", action="store_true", help="write the outputs in README.md and docs/ anew")
    parser.addoption("--refresh-slow-tests", action="store_true", help="write tests/slow_tests.txt anew")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: a cache for this session alone, and time for examples that are drawn."""
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist inherits the cache: what one builds, all load
        cache = tempfile.TemporaryDirectory(prefix="fusion-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(cache.cleanup)
        os.environ["FUSION_CACHE_DIR"] = cache.name
        if hasattr(config, "cache"):  # not with `-p no:cacheprovider`
            keep_objects(config.cache.mkdir("c-kernels"), Path(cache.name))
    config.pluginmanager.register(SlowTests(refresh=config.getoption("--refresh-slow-tests")), PLUGIN)
    os.environ["FUSION_CLOSE_CALLS"] = "0"  # what is measured differs from run to run
    os.environ["FUSION_GRAPH_CACHE"] = "0"  # each test compiles its graphs; `tests/fusion/graph_cache/` asks for it
    torch.set_num_threads(2)
    if find_spec("hypothesis"):  # a machine for tests of a device may be without it
        from hypothesis import HealthCheck, settings

        # other processes may need the same cores
        settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("patient")


def keep_objects(kept: Path, cache: Path) -> None:
    """Link the C target's folder of `cache` to one that the next session reuses.

    Emitting C and loading the object stay in each session.  The compiler is skipped if it was called before with the
    same text, flags and version on the same CPU: the name of an object is their hash.
    """
    for path in kept.iterdir():
        if path.stat().st_mtime < time.time() - DAYS_KEPT * 86400:
            path.unlink(missing_ok=True)
    (cache / "c").symlink_to(kept, target_is_directory=True)


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collection, since a pass over all of PyTorch takes a third of a second.

    Collect rarely: with Python's thresholds, 5% of the time of a sample of tests went into it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    leave_modules_unpatched()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where no device is present."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def leave_modules_unpatched() -> None:
    """Skip the assignments to `nn.Module.__call__` and `__getattr__` with which `make_fx` begins and ends a trace.

    Its tracer assigns functions that do what the originals do.  Each assignment has Python update all subclasses, a
    thousand once the models of transformers are imported: 5% of the time of a sample of tests.  Other tracers, which
    record modules, assign theirs.
    """
    from torch.fx import _symbolic_trace
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    patch = _symbolic_trace._Patcher.patch_method

    def patch_method(patcher: object, owner: type, name: str, function: FunctionType, deduplicate: bool = True) -> None:
        tracers = [cell.cell_contents for cell in function.__closure__ or () if owner is torch.nn.Module]
        if not any(isinstance(each, PythonKeyTracer) for each in tracers):
            patch(patcher, owner, name, function, deduplicate)

    _symbolic_trace._Patcher.patch_method = patch_method


def seed() -> None:
    """Seed the generators that a test may draw from.

    `torch.manual_seed` also notes a stack trace for each kind of device that may be initialised later.
    """
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    """Seed torch and reset its warnings before the test; reset Dynamo after it.

    The garbage of a compilation waits for Python's collector here; processes that tests start keep Dynamo's default.
    """
    seed()
    if "torch._dynamo.config" in sys.modules:
        sys.modules["torch._dynamo.config"].run_gc_after_compile = False
    leave_out_logs()
    if "fusion.calls.fallback" in sys.modules:
        sys.modules["fusion.calls.fallback"].warn_once.cache_clear()
    yield
    if "torch._dynamo" in sys.modules:  # importing it only to reset it would cost seconds
        torch._dynamo.reset()


@pytest.fixture
def without_disassembly(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that compile for a GPU and read no SASS: to disassemble a binary takes as long as to compile it."""
    if find_spec("triton"):
        monkeypatch.setattr("fusion.codegen.triton.launch.aot.disassembly", lambda binary: "")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small tensors and many operations, where a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
