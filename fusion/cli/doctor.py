"""Examines this machine: the compiler's requirements, their state, and the remedy for each failure (`fusion doctor`).

Input: nothing; output: a check for each tool, and for each target a small program that is compiled, run and compared
with eager.  The exit code is 1 if the default target of a device that PyTorch sees does not work.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch._dynamo.eval_frame import is_dynamo_supported
from torch._dynamo.exc import BackendCompilerFailed

import fusion
from fusion.backend import Backend
from fusion.cli.output import print_json
from fusion.codegen.c.build import bind_openmp
from fusion.codegen.c.compiler import find_compiler
from fusion.codegen.cache import cache_dir, put
from fusion.codegen.targets import DEFAULTS, TARGETS
from fusion.compilation.region import compile_anew
from fusion.lowering.errors import FusionError, brief
from fusion.lowering.printer import format_bytes
from fusion.options import Options

OLDEST = {"torch": (2, 11), "triton": (3, 6)}
"""The oldest versions that are supported, as in `pyproject.toml`."""

OK, ABSENT, FAILS = "ok", "absent", "FAILS"

DEVICE_FILES = ("/dev/nvidia0", "/dev/kfd")
"""The files that the drivers of NVIDIA and AMD GPUs create on Linux."""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    Attributes:
        state: "ok"; "absent", of a tool that this machine does not need; "FAILS".
        found: a version, a path, or why it fails.
        remedy: the software to install, or the setting to change; empty if nothing.
        decides: whether the exit code depends on it.
    """

    name: str
    state: str
    found: str
    remedy: str = ""
    decides: bool = False

    def __str__(self) -> str:
        lines = [f"{self.state:<8}{self.name:<18}{self.found}"]
        return "\n".join([*lines, *([f"{'':<26}→ {self.remedy}"] if self.remedy else [])])


def doctor(arguments: argparse.Namespace) -> int:
    """Print every check; exit with 1 if the default target of a present device fails."""
    checks = list(examined())
    failed = any(check.decides and check.state == FAILS for check in checks)
    if arguments.json:
        print_json({"works": not failed, "checks": [asdict(check) for check in checks]})
    else:
        print("\n".join(map(str, checks)))
    return 1 if failed else 0


def examined() -> Iterator[Check]:
    """Yield the checks, in order."""
    yield Check("fusion", OK, f"{fusion.__version__}, in {Path(str(fusion.__file__)).parent}")
    yield _checked("python", _python, "install a version of Python that this PyTorch can compile for")
    yield _checked("torch", _torch, "reinstall PyTorch: https://pytorch.org/get-started/locally/")
    yield _triton()
    yield _checked("C compiler", _c_compiler, "install gcc, or name a compiler in $CC")
    yield _checked("OpenMP", _openmp, "install the OpenMP run time of GCC (libgomp)")
    yield _checked("cache directory", _cache, "set FUSION_CACHE_DIR to a directory of yours that can be written")
    yield _gpu()
    for target in sorted(TARGETS):
        yield _target(target)


def _checked(name: str, examine: Callable[[], str], remedy: str, *, decides: bool = False) -> Check:
    """Run a check; an error that it raises is its failure."""
    try:
        return Check(name, OK, examine(), decides=decides)
    except Exception as error:  # any defect of the machine's software is a finding
        cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if isinstance(cause, FusionError):
            return Check(name, FAILS, brief(cause), cause.hint or remedy, decides)
        return Check(name, FAILS, f"{type(cause).__name__}: {brief(cause)}", remedy, decides)


# Tools ----------------------------------------------------------------------------------------------------------------


def _python() -> str:
    versions = f"{platform.python_version()} on {platform.platform()}"
    if not is_dynamo_supported():
        raise FusionError(f"{versions}: this PyTorch cannot capture programs of this version")
    return versions


def _torch() -> str:
    _refuse_older("torch", torch.__version__)
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    devices = [f"{name} {number}" for name, number in built.items() if number]
    return f"{torch.__version__}, built for {' and '.join(devices) or 'CPUs alone'}, {torch.get_num_threads()} threads"


def _refuse_older(name: str, installed: str) -> None:
    """Refuse a version below the least that is supported.

    Raises:
        FusionError: it is older.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if numbers < OLDEST[name]:
        wanted = ".".join(map(str, OLDEST[name]))
        raise FusionError(f"{installed}; {wanted} is needed", hint=f"pip install '{name}>={wanted}'")


def _triton() -> Check:
    """Check Triton, which is needed where there is a GPU."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        state = FAILS if torch.cuda.is_available() else ABSENT
        return Check("triton", state, "not installed; GPUs need it", "pip install triton")

    def examine() -> str:
        _refuse_older("triton", installed)
        TARGETS["triton"]()  # imports it
        return installed

    return _checked("triton", examine, "reinstall triton")


def _c_compiler() -> str:
    compiler = find_compiler()
    return f"{' '.join(compiler.command)}: {compiler.version.splitlines()[0]}"


def _openmp() -> str:
    bind_openmp()
    return f"PyTorch's own thread pool, {torch.get_num_threads()} of {os.cpu_count()} CPUs"


def _cache() -> str:
    path = cache_dir()
    put("tuned", probe := "0" * 64, b"fusion doctor")
    (path / "tuned" / probe).unlink()
    mode, free = stat.S_IMODE(path.stat().st_mode), shutil.disk_usage(path).free
    return f"{path}, mode {mode:03o}, {format_bytes(free)} free"


def _gpu() -> Check:
    if torch.cuda.is_available():
        return _checked("GPU", _gpus, "update the driver of the GPU")
    if any(os.path.exists(file) for file in DEVICE_FILES):
        remedy = "install a PyTorch that is built for it, and a driver as new: https://pytorch.org/get-started/locally/"
        return Check("GPU", FAILS, "there is one, and PyTorch cannot use it", remedy)
    return Check("GPU", ABSENT, "PyTorch sees none")


def _gpus() -> str:
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{each.name} ({format_bytes(each.total_memory)})" for each in devices)


# Targets --------------------------------------------------------------------------------------------------------------


def _target(name: str) -> Check:
    """Compile and run a program for a target, on a device that it serves."""
    devices = [device for device, default in DEFAULTS.items() if default == name] or ["cpu"]
    present = [device for device in devices if device == "cpu" or torch.cuda.is_available()]
    remedy = "see the message; FUSION_DUMP=dir keeps the source"
    if present:
        decides = name in DEFAULTS.values()
        return _checked(f"target {name}", lambda: _ran(name, present[0]), remedy, decides=decides)
    try:
        version("triton")
    except PackageNotFoundError:
        return Check(f"target {name}", ABSENT, "its compiler is not installed, and there is no GPU")
    return _checked(f"target {name}", lambda: _exported(name), remedy)


def _ran(target: str, device: str) -> str:
    """Compile a program that no earlier process has built, run it, and compare."""
    factor = 1 + random.random()

    def smoke(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * factor + y, dim=-1)

    x, y = (torch.randn(*shape, device=device) for shape in ((8, 100), (100,)))
    options = Options.read(
        None, {"target": target, "strict": True, "graph_cache": False, "dump": None, "override": None}
    )
    backend = Backend(options)
    with torch.no_grad():
        got, expected = compile_anew(smoke, backend)(x, y), smoke(x, y)
    if not (launches := [kernel for report in backend.reports for kernel in report.kernels]):
        raise FusionError("no kernel was generated")
    torch.testing.assert_close(got, expected)
    return f"on {device}: {len(launches)} kernel compiled, run, and equal to eager's result"


def _exported(target: str) -> str:
    """Compile a kernel ahead of time."""
    export = fusion.export_kernels(lambda x: torch.softmax(x, dim=-1), torch.empty(8, 100), target=target)
    binaries = [suffix for kernel in export.kernels for suffix in kernel.artefacts]
    return f"compiled ahead of time ({', '.join(binaries)}), not run: there is no GPU"
