"""The C target: compiling, caching, loading, and refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusion
from fusion.codegen.c.build import assembly, bind_openmp
from fusion.codegen.c.text.library import vector_functions
from fusion.codegen.cache import cache_dir, digest, publish
from fusion.lowering.errors import BuildError
from fusion.lowering.expr import const
from fusion.lowering.expr import make_op as op
from fusion.lowering.kernel import Fold, Kernel, Store
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


def test_a_damaged_object_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    result, source, x = simple()
    TARGET.build(result, source)
    (path,) = (tmp_path / "cache" / "c").iterdir()
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b"?"):
        publish(path, damaged)
        out = torch.empty_like(x)
        TARGET.build(result, source)(x, out)
        assert torch.equal(out, x * 2)
        assert len(path.read_bytes()) == len(whole)


def test_another_users_object_is_not_loaded(tmp_path, monkeypatch):
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    result, source, _ = simple()
    TARGET.build(result, source)
    (path,) = (tmp_path / "cache" / "c").iterdir()
    os.chown(path, 12345, -1)
    TARGET.build(result, source)
    assert path.stat().st_uid == 0


def test_another_command_of_the_same_compiler_builds_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    result, source, _ = simple()
    for command in ("gcc", "gcc -DUNUSED", "gcc"):
        monkeypatch.setenv("CC", command)
        TARGET.build(result, source)
    assert len(list((tmp_path / "cache" / "c").iterdir())) == 2


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
    assert source.count("static void kernel_1(") == 1
    assert "\n\n// sum, mul (a.py:3)\nvoid kernel(" in source  # above the function that is launched
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


def test_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "a"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("FUSION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fusion"
    publish(tmp_path / "fusion" / "deep" / "file", b"content")
    assert (tmp_path / "fusion" / "deep" / "file").read_bytes() == b"content"
    assert [path.name for path in (tmp_path / "fusion" / "deep").iterdir()] == ["file"]
    assert digest("a", b"b") != digest("ab", b"")
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "plain" / "below"))
    with pytest.raises(BuildError, match="FUSION_CACHE_DIR"):
        cache_dir()


def test_another_process_loads_the_built_object(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    value, source, _ = simple()
    TARGET.build(value, source)
    (built,) = (tmp_path / "c").iterdir()
    first = built.stat().st_mtime_ns
    script = (
        "import sys; sys.path.insert(0, '.');"
        "import importlib.util as u; s = u.spec_from_file_location('t', sys.argv[1]); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); made, source, x = m.simple(); m.TARGET.build(made, source)"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", script, str(Path(__file__).resolve())], cwd=root, check=True)
    (result,) = (tmp_path / "c").iterdir()
    assert result == built and result.stat().st_mtime_ns == first
