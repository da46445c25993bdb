"""The C target: compiling, caching, loading, and refusals."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusion
from fusion.codegen.c import build, compiler
from fusion.codegen.c import load as loading
from fusion.codegen.c.build import assembly, bind_openmp, link_library
from fusion.codegen.c.compiler import has_threads
from fusion.codegen.c.target import CTarget
from fusion.codegen.c.text.library import vector_functions
from fusion.codegen.cache import get, put
from fusion.codegen.cache.folders import Folder
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.expr import const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Store
from tests.codegen.c.kernels import F32, TARGET, WHOLE, ZERO, assert_close_to_exact, axis, i0, i1, kernel, r0
from tests.codegen.kernels.making import load


def simple() -> tuple[Kernel, str, torch.Tensor]:
    x = torch.randn(64)
    example = kernel({"x": x}, {"out": x}, [axis(i0, 64)], Store("out", i0, op("mul", load("x", i0), const(2.0, F32))))
    return example, TARGET.emit(example), x


def test_the_compilers_message_is_reported():
    result, source, _ = simple()
    with pytest.raises(BuildError, match="undeclared"):
        TARGET.build(result, source.replace("x[i0]", "y[i0]"))


def test_a_compiler_that_is_not_there(monkeypatch):
    result, source, _ = simple()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        TARGET.build(result, source)


@pytest.fixture
def objects(tmp_path, monkeypatch):
    """Where the objects of this test alone are."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "c"


def multiplied(factor: float) -> bool:
    """Build the kernel that multiplies by `factor`; return whether it does."""
    result, source, x = simple()
    out = torch.empty_like(x)
    TARGET.build(result, source.replace("2.0f", f"{factor}f"))(x, out)
    return torch.equal(out, x * factor)


def test_a_damaged_object_is_built_again(objects):
    assert multiplied(2.0)
    (path,) = objects.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b"?"):
        path.write_bytes(damaged)
        assert multiplied(2.0)
        assert len(path.read_bytes()) == len(whole)


def test_exchanged_objects_are_built_again(objects):
    assert multiplied(2.0) and multiplied(5.0)
    first, second = objects.iterdir()
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert multiplied(2.0) and multiplied(5.0)


@pytest.mark.parametrize("obstruct", [Path.mkdir, os.mkfifo])
def test_what_is_no_object_is_replaced(objects, obstruct):
    assert multiplied(2.0)
    (path,) = objects.iterdir()
    path.unlink()
    obstruct(path)
    assert multiplied(2.0)
    assert path.is_file()


def test_an_object_that_cannot_be_loaded_is_built_once_more(objects, monkeypatch):
    assert multiplied(2.0)
    (path,) = objects.iterdir()
    right = get("c", path.name)
    with pytest.raises(BuildError, match="cannot be loaded"):
        TARGET.build(simple()[0], simple()[1].replace("kernel(", "another("))
    (wrong,) = set(objects.iterdir()) - {path}
    cut_off = (right[:size] for size in (0, 20, 64, 700, len(right) // 2, len(right) - 64))
    for content in (b"no object", get("c", wrong.name), *cut_off):  # each sealed under this name
        put("c", path.name, content)
        assert multiplied(2.0)
        assert len(get("c", path.name)) == len(right)
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("built once more"))
    assert multiplied(2.0)


def test_an_object_that_cannot_be_kept_is_loaded(objects, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Folder, "rename", full)
    target = CTarget()
    monkeypatch.setattr(sys.modules[__name__], "TARGET", target)
    assert target.missing_tools() == ""
    assert multiplied(2.0)
    assert re.fullmatch(r"built kernels are not kept: cannot write .*No space left on device", target.missing_tools())
    assert list(objects.iterdir()) == []


def test_a_folder_of_another_user_is_named(objects):
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    assert multiplied(2.0)
    os.chown(objects, 12345, -1)
    with pytest.raises(BuildError, match=r"c belongs to another user(?s:.*)FUSION_CACHE_DIR"):
        multiplied(2.0)


def mapped_objects() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kernel")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="objects are loaded from files here")
def test_an_object_is_unloaded_with_its_last_function(objects):
    result, source, x = simple()
    gc.collect()
    before = mapped_objects(), len(os.listdir("/proc/self/fd"))
    launchers = [TARGET.build(result, source.replace("2.0f", f"{n}.0f")) for n in range(1, 6)]
    assert mapped_objects() > before[0]
    for n, launch in enumerate(launchers, 1):  # though descriptors have their numbers again
        out = torch.empty_like(x)
        launch(x, out)
        assert torch.equal(out, x * n)
    assert len(os.listdir("/proc/self/fd")) == before[1]
    del launch, launchers
    gc.collect()
    assert mapped_objects() == before[0]


def test_without_memory_that_has_a_descriptor(objects, monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert multiplied(2.0) and multiplied(5.0)
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("built again"))
    assert multiplied(2.0) and multiplied(5.0)


def test_a_memory_that_may_not_be_executed(objects, monkeypatch):
    real = ctypes.CDLL

    def refused(path):
        if path.startswith("/proc"):
            raise OSError(f"{path}: failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(loading.ctypes, "CDLL", refused)
    monkeypatch.setattr(build, "bind_openmp", lambda: None)
    assert multiplied(2.0)


def test_another_users_object_is_not_loaded(objects):
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    assert multiplied(2.0)
    (path,) = objects.iterdir()
    os.chown(path, 12345, -1)
    assert multiplied(2.0)
    assert path.stat().st_uid == 0


def compiler_at(folder: Path, text: str = 'exec gcc "$@"') -> Path:
    """Write a compiler that calls gcc."""
    folder.mkdir(exist_ok=True)
    path = folder / "gcc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_path_of_a_compiler_may_have_spaces(objects, tmp_path, monkeypatch):
    compiler = compiler_at(tmp_path / "my compilers")
    for command in (str(compiler), f"'{compiler}' -DUNUSED", f"gcc '-DNAME=a b' -DFACTOR={compiler.name}"):
        monkeypatch.setenv("CC", command)
        assert multiplied(2.0)
    assert len(list(objects.iterdir())) == 3


def test_compilers_of_the_same_version_have_objects_of_their_own(objects, tmp_path, monkeypatch):
    first, second = (compiler_at(tmp_path / name) for name in ("one", "two"))
    path = os.environ["PATH"]
    for folder in (first.parent, second.parent):  # the same command
        monkeypatch.setenv("CC", "fusion-gcc")
        (folder / "gcc").rename(folder / "fusion-gcc")
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{path}")
        assert multiplied(2.0)
    assert len(list(objects.iterdir())) == 2
    (second.parent / "fusion-gcc").write_text('#!/bin/sh\nexec gcc "$@" # of a new release\n')
    compiler._compiler.cache_clear()  # as in another process
    assert multiplied(2.0)
    assert len(list(objects.iterdir())) == 3


def test_messages_of_the_compiler_need_not_be_text(objects, tmp_path, monkeypatch):
    text = "test \"$1\" = --version && exec gcc --version; printf 'caf\\351' >&2; exit 1"
    monkeypatch.setenv("CC", str(compiler_at(tmp_path / "broken", text)))
    with pytest.raises(BuildError, match=r"caf\\xe9"):
        multiplied(2.0)


def test_no_place_for_temporary_files(objects, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(BuildError, match=r"nothing can be compiled(?s:.*)TMPDIR"):
        multiplied(2.0)


def test_another_command_of_the_same_compiler_builds_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    result, source, _ = simple()
    for command in ("gcc", "gcc -DUNUSED", "gcc"):
        monkeypatch.setenv("CC", command)
        TARGET.build(result, source)
    assert len(list((tmp_path / "cache" / "c").iterdir())) == 2


def test_one_call_of_the_compiler_makes_an_object_that_needs_no_openmp_library(objects, monkeypatch):
    monkeypatch.setenv("CC", "gcc -DCALLED")
    run, calls = compiler._done, []
    monkeypatch.setattr(compiler, "_done", lambda command: calls.append(command) or run(command))
    x, out = torch.rand(1 << 20), torch.empty(1 << 20)
    given = kernel({"x": x}, {"out": x}, [axis(i0, 1 << 20)], Store("out", i0, op("neg", load("x", i0))))
    TARGET.build(given, TARGET.emit(given))(x, out)
    assert torch.equal(out, -x)
    assert len([call for call in calls if "-DCALLED" in call and "-o" in call]) == 1
    (path,) = objects.iterdir()
    content = get("c", path.name)
    assert b"GOMP_parallel" in content and b"libgomp" not in content


def test_the_files_of_a_library_are_compiled_once(objects, monkeypatch):
    compiled: list[str] = []
    call = compiler.Compiler.call

    def counting(self: compiler.Compiler, *arguments: str) -> str:
        compiled.extend(Path(argument).name for argument in arguments if argument.endswith(".c"))
        return call(self, *arguments)

    monkeypatch.setattr(compiler.Compiler, "call", counting)
    has_threads(compiler.find_compiler())
    compiled.clear()
    files = {"run.c": '#include "run.h"\nint run(void) { return NUMBER; }\n', "run.h": "#define NUMBER 1\n"}
    link_library(files, "native")
    link_library({**files, "kernel_0.c": "int first(void) { return 0; }\n"}, "native")
    assert compiled == ["run.c", "kernel_0.c"]
    link_library({**files, "run.h": "#define NUMBER 2\n"}, "native")
    assert compiled == ["run.c", "kernel_0.c", "run.c"]
    for entry in objects.iterdir():
        entry.write_bytes(b"damaged")
    link_library(files, "native")
    assert compiled == ["run.c", "kernel_0.c", "run.c", "run.c"]


def test_an_edited_kernel_runs_as_edited():
    result, source, x = simple()
    out = torch.empty_like(x)
    TARGET.build(result, source.replace("2.0f", "5.0f"))(x, out)
    assert torch.equal(out, x * 5)


def test_the_kernel_after_the_grid_runs_last():
    x = torch.randint(-9, 9, (300, 1000)).float()  # whole numbers: their sum is exact in any order
    partial, out = torch.empty(300), torch.empty(())
    part = Fold("part", "sum", (load("x", 1000 * i0 + r0),), (r0,), F32)
    total = Fold("total", "sum", (load("partial", r0),), (r0,), F32)
    whole = kernel({"partial": partial}, {"out": out}, [axis(r0, 300, WHOLE)], total, Store("out", ZERO, total.ref))
    axes = [axis(i0, 300), axis(r0, 1000, WHOLE)]
    first = kernel({"x": x}, {"partial": partial, "out": out}, axes, part, Store("partial", i0, part.ref))
    example = replace(first, then=whole)
    TARGET.build(example, TARGET.emit(example))(x, partial, out)
    assert torch.equal(out, x.sum())


def test_the_kernel_after_the_grid_may_read_other_tensors():
    x, rows, total, top = torch.randn(6, 4), torch.empty(6), torch.empty(()), torch.empty(())
    row = Fold("row", "sum", (load("x", 4 * i0 + r0),), (r0,), F32)
    example = kernel(
        {"x": x},
        {"rows": rows, "total": total, "top": top},
        [axis(i0, 6), axis(r0, 4, WHOLE)],
        row,
        Store("rows", i0, row.ref),
    )
    sum_ = Fold("sum", "sum", (load("rows", r0),), (r0,), F32)
    most = Fold("most", "max", (load("x", r0),), (r0,), F32)
    second = kernel({"rows": rows}, {"total": total}, [axis(r0, 6, WHOLE)], sum_, Store("total", ZERO, sum_.ref))
    third = kernel({"x": x}, {"top": top}, [axis(r0, 24, WHOLE)], most, Store("top", ZERO, most.ref))
    example = replace(example, then=replace(second, then=third))
    TARGET.build(example, TARGET.emit(example))(x, rows, total, top)
    assert torch.equal(top, x.max())
    assert_close_to_exact(total, x.sum(), x.double().sum())


def test_an_empty_grid_stores_nothing():
    x, out = torch.empty(5, 0), torch.empty(5, 0)
    inner = Fold("inner", "max", (load("x", i0),), (r0,), F32)
    axes = [axis(i0, 5), axis(i1, 0), axis(r0, 1, WHOLE)]
    example = kernel(
        {"x": x}, {"out": out}, axes, inner, Store("out", i0 + i1, op("mul", inner.ref, load("x", i0 + i1)))
    )
    source = TARGET.emit(example)
    assert "=" not in source.split("{")[-1]
    TARGET.build(example, source)(x, out)


def test_a_kernel_beside_another_runs_in_the_same_call():
    x, y = torch.randn(300, 1000), torch.randn(7)
    sums, twice = torch.empty(300), torch.empty(7)
    part = Fold("part", "sum", (load("x", 1000 * i0 + r0),), (r0,), F32)
    axes = [axis(i0, 300), axis(r0, 1000, WHOLE)]
    rows = kernel({"x": x, "y": y}, {"sums": sums, "twice": twice}, axes, part, Store("sums", i0, part.ref))
    doubled = op("mul", load("y", i0), const(2.0, F32))
    other = kernel({"y": y}, {"twice": twice}, [axis(i0, 7)], Store("twice", i0, doubled))
    example = replace(rows, beside=(other,), origins=("sum, mul (a.py:3)",))
    source = TARGET.emit(example)
    assert source.count("static int kernel_1(") == 1
    assert "\n\n// sum, mul (a.py:3)\nint kernel(" in source  # above the function that is launched
    TARGET.build(example, source)(x, y, sums, twice)
    assert torch.equal(twice, y * 2)
    assert_close_to_exact(sums, x.sum(1), x.double().sum(1))


def test_unknown_dtypes_are_refused():
    x = torch.randn(4, 4)
    odd = torch.empty(4, dtype=torch.complex64)
    with pytest.raises(BuildError, match="complex64"):
        TARGET.emit(kernel({"x": odd}, {"out": x}, [axis(i0, 4)], Store("out", i0, load("x", i0))))


def test_one_openmp_run_time_in_the_process():
    """PyTorch's OpenMP is used, also if other packages of the process have loaded another."""

    def mapped() -> set[str]:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line or "libomp" in line}

    before = mapped()
    bind_openmp()
    result, source, _ = simple()
    TARGET.build(result, source)
    assert before and mapped() == before


@pytest.mark.skipif("erfcf" not in vector_functions(), reason="libmvec has no erfc here")
def test_calls_in_choices_take_all_lanes():
    """A call has no form for some of the lanes: a compiler that moves it into a branch vectorises none."""
    fused = fusion.fuse(torch.special.ndtri, options={"target": "c", "strict": True})
    fused(torch.rand(1000))
    ((result,),) = (graph.kernels for graph in fusion.report(fused).graphs)
    assert re.search(r"_ZGV\w+_erfcf", assembly(result.source))


def test_assembly_names_the_lines_of_the_source():
    _, source, _ = simple()
    text = assembly(source)
    lines = {int(line) for line in re.findall(r"^\s*\.loc \d+ (\d+)", text, re.MULTILINE)}
    assert any("out[" in source.splitlines()[line - 1] for line in lines)
    assert ".debug_" not in re.sub(r"\.L\w+", "", text) and os.getcwd() not in text and "fusion-" not in text


def test_another_process_loads_the_built_object(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    value, source, _ = simple()
    TARGET.build(value, source)
    (built,) = (tmp_path / "c").iterdir()
    first = built.stat().st_ino
    script = (
        "import sys; sys.path.insert(0, '.');"
        "import importlib.util as u; s = u.spec_from_file_location('t', sys.argv[1]); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); made, source, x = m.simple(); m.TARGET.build(made, source)"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", script, str(Path(__file__).resolve())], cwd=root, check=True)
    (result,) = (tmp_path / "c").iterdir()
    assert result == built and result.stat().st_ino == first
