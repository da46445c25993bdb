"""The command line: its output, and its errors."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

import fusion
from fusion.cli import TARGETS as NAMED
from fusion.cli import main
from fusion.codegen.cache import FOLDERS, FolderName
from fusion.codegen.targets import TARGETS

PROGRAM = """
import torch
from torch import nn

FACTOR = 2.0

def scaled(x, y):
    return torch.relu(x) * y + FACTOR

def picked(table, rows):
    return table[rows] * 2

def untouched(x):
    return x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LayerNorm(16)

    def forward(self, x):
        return torch.tanh(self.inner(x))

class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "user_program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_explain_prints_kernels_and_traffic(program, capsys):
    assert main(["explain", f"{program}:scaled", "--shape", "8,128", "--shape", "128"]) == 0
    shown = capsys.readouterr().out
    assert "1 kernel" in shown
    assert "reads 4.5 KiB, writes 4.0 KiB" in shown


def test_accuracy_prints_the_error_of_each_kernel(program, capsys):
    assert main(["accuracy", f"{program}:scaled", "--shape", "8,128", "--shape", "128"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^kernel relu_mul_add, out0: error \d\.\de-0\d, by its dtypes", shown)
    assert "relu, mul, add (user_program.py:8)" in shown


def test_explain_shows_the_time_of_each_pass(program, capsys):
    assert main(["explain", f"{program}:scaled", "--shape", "8,128", "--shape", "128", "--times"]) == 0
    _, times = capsys.readouterr().out.split("compilation of inference:\n")
    rows = [line.split() for line in times.strip().splitlines()]
    assert {"program/inlined", "clusters/clusters", "build/generate"} <= {row[2] for row in rows}
    total = float(rows[-1][0])
    assert rows[-1][2:] == ["in", "all"] and abs(sum(float(row[0]) for row in rows[:-1]) - total) <= 0.1 * len(rows)


def test_explain_measures_kernels_on_request(program, capsys):
    assert main(["explain", f"{program}:scaled", "--shape", "8,128", "--shape", "128", "--measure"]) == 0
    assert re.search(r"kernel \w+: .*, predicted \d+\.\d µs, measured \d+\.\d µs", capsys.readouterr().out)


def test_explain_writes_a_page_where_asked(program, tmp_path, capsys):
    command = ["explain", f"{program}:scaled", "--shape", "8", "--shape", "8", "--html"]
    page = tmp_path / "report.html"
    assert main([*command, str(page)]) == 0
    assert f"The page is in {page}." in capsys.readouterr().out
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main([*command, str(tmp_path / "absent" / "report.html")]) == 2
    shown = capsys.readouterr().err
    assert "cannot be written: No such file or directory" in shown and "hint: name a file" in shown


def test_explain_takes_a_module_class(program, capsys):
    assert main(["explain", f"{program}:Net", "--shape", "4,16"]) == 0
    assert "kernel" in capsys.readouterr().out


def test_explain_takes_a_dtype_per_input(program, capsys):
    inputs = ["--shape", "8,16", "--dtype", "float32", "--shape", "5", "--dtype", "int64"]
    assert main(["explain", f"{program}:picked", *inputs]) == 0
    assert "1 kernel" in capsys.readouterr().out


def test_explain_writes_dumps_where_asked(program, tmp_path, capsys):
    assert main(["explain", f"{program}:scaled", "--shape", "8", "--shape", "8", "--dump", str(tmp_path / "d")]) == 0
    assert list((tmp_path / "d").glob("*/99_report.txt"))


def test_kernels_prints_the_source_once_per_kernel(program, capsys):
    assert main(["kernels", f"{program}:scaled", "--shape", "8,128", "--shape", "128"]) == 0
    shown = capsys.readouterr().out
    assert "=== kernel 1 of 1: " in shown
    assert "for" in shown.split("===")[2]


def test_kernels_generates_for_a_target_without_its_device(program, capsys):
    assert main(["kernels", f"{program}:Net", "--shape", "4,16", "--target", "triton"]) == 0
    assert "@triton.jit" in capsys.readouterr().out


def test_kernels_reports_that_there_is_none(program, capsys):
    assert main(["kernels", f"{program}:untouched", "--shape", "4"]) == 1
    assert "no kernel was generated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["explain", "nothing"], "names no program", "FILE.py:NAME"),
        (["explain", "absent.py:f"], "there is no file", "looked in"),
        (["explain", "PROGRAM:absent"], "has nothing called 'absent'", "scaled"),
        (["explain", "PROGRAM:FACTOR"], "has a float called 'FACTOR', which cannot be run", "scaled"),
        (["explain", "PROGRAM:Needy"], "cannot be instantiated", "takes no arguments"),
        (["explain", "PROGRAM:scaled", "--shape", "8,x"], "is no shape", "--shape 8,128"),
        (["explain", "PROGRAM:scaled", "--shape", "8", "--dtype", "f"], "unknown dtype", "float32"),
        (["explain", "PROGRAM:scaled", "--shape", "8", *["--dtype", "int8"] * 2], "2 dtypes for 1 shapes", "one per"),
        (["explain", "PROGRAM:scaled", "--shape", "8"], "the program failed on (8,)", "one --shape per input"),
        (["explain", "PROGRAM:scaled", "--shape", "3", "--shape", "4"], "the program failed", "--shape"),
        (
            ["explain", "PROGRAM:scaled", "--shape", "3", "--device", "nowhere"],
            "'nowhere' cannot be used",
            "needs no GPU",
        ),
    ],
)
def test_errors_have_a_message_a_hint_and_code_2(program, arguments, message, hint, capsys):
    assert main([word.replace("PROGRAM", program) for word in arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("fusion: error: ")
    assert message in shown
    assert hint in shown.partition("hint:")[2]
    assert "Traceback" not in shown


def test_errors_name_the_line_of_the_program(program, tmp_path, capsys):
    assert main(["explain", f"{program}:scaled", "--shape", "3", "--shape", "4"]) == 2
    assert "at: scaled (" in capsys.readouterr().err
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\n\nnumber = torch.ones(2) @ torch.ones(3)\n")
    assert main(["explain", f"{broken}:number"]) == 2
    assert "at: <module> (broken.py:3)" in capsys.readouterr().err


def test_every_target_can_be_asked_for():
    assert sorted(TARGETS) == sorted(NAMED)


def test_an_unknown_command_is_refused_with_code_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fuse-it"])
    assert stopped.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_dumps_go_into_a_directory(program, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", f"{program}:scaled", "--shape", "3", "--dump", program])
    assert stopped.value.code == 2
    assert f"--dump: {program} is a file" in capsys.readouterr().err


def test_the_cache_is_shown_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSION_GRAPH_CACHE", "1")
    torch._dynamo.reset()
    fusion.fuse(lambda x: x.softmax(-1), options={"strict": True})(torch.randn(5, 3))
    others = tmp_path / "cache" / "c" / "notes.txt"
    others.write_text("not ours")
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path / "cache") in shown
    assert "c/  1 kept" in shown
    assert "graphs/  1 kept" in shown
    assert "regions/  1 kept" in shown
    assert main(["cache", "--clear"]) == 0
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [others]
    capsys.readouterr()
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.count(" 0 kept, 0 B") == len(FOLDERS)


def test_every_folder_of_the_cache_is_shown():
    assert set(get_args(FolderName)) == FOLDERS.keys()
