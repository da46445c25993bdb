"""The commands of the command line: their output and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch

import fusion
from fusion.cli import main
from fusion.cli.arguments import TARGETS as NAMED
from fusion.codegen.c.target import CTarget
from fusion.codegen.cache import FOLDERS, FolderName
from fusion.codegen.targets import TARGETS
from tests.fusion.planted import plant_in_results


def test_explain_prints_kernels_and_traffic(program, capsys):
    assert main(["explain", f"{program}:scaled", "--shape", "8,128", "--shape", "128"]) == 0
    shown = capsys.readouterr().out
    assert "1 kernel" in shown
    assert "reads 4.5 KiB, writes 4.0 KiB" in shown


def test_accuracy_ends_with_1_where_a_kernel_is_wrong(program, monkeypatch, capsys):
    plant_in_results(monkeypatch, "relu")
    assert main(["accuracy", f"{program}:Net", "--shape", "4,16"]) == 0
    assert main(["accuracy", f"{program}:scaled", "--shape", "8,12", "--shape", "12"]) == 1
    assert "WRONG: kernel relu" in capsys.readouterr().out


def test_accuracy_prints_the_error_of_each_kernel(program, capsys):
    assert main(["accuracy", f"{program}:scaled", "--shape", "8,128", "--shape", "128"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^kernel relu_mul_add, out0: error \d\.\de-0\d, by its dtypes", shown)
    assert "relu, mul, add (user_program.py:8)" in shown


def test_explain_shows_the_time_of_each_pass(program, capsys):
    assert main(["explain", f"{program}:scaled", "--shape", "8,128", "--shape", "128", "--times"]) == 0
    _, times = capsys.readouterr().out.split("compilation of inference:\n")
    rows = [line.split() for line in times.strip().splitlines()]
    assert {"program/inline_cheap_maps", "clusters/grow_clusters", "build/generate"} <= {row[2] for row in rows}
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
    assert main([*command, str(tmp_path / f"{'long' * 100}.html")]) == 2
    shown = capsys.readouterr().err
    assert "cannot be written: File name too long" in shown and "hint: name a file" in shown


@pytest.mark.parametrize("command", ["kernels", "ptx", "bench", "verify", "bisect", "time"])
def test_commands_write_what_they_found_as_a_page(program, command, tmp_path, capsys):
    page = tmp_path / "report.html"
    words = [command, f"{program}:Net", "--shape", "4,16", *(["--rounds", "2"] if command == "time" else [])]
    assert main([*words, "--html", str(page)]) == 0
    shown, _, last = capsys.readouterr().out.rpartition("\n\n")
    assert last == f"The page is in {page}.\n"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert data is not None
    report = json.loads(data[1])["report"]
    assert report["graphs"][0]["steps"] and report["kernels"][0]["artefacts"]
    finding = report["finding"]
    assert finding is None if command in ("kernels", "ptx") else finding == {**finding, "good": True, "text": shown}
    if command == "bench":
        assert report["graphs"][0]["steps"][0]["measured"] > 0
    assert main([*words, "--json", "--html", str(page)]) == 0
    json.loads(capsys.readouterr().out)


def test_a_page_says_that_results_differ(program, monkeypatch, tmp_path, capsys):
    plant(monkeypatch, " + 2.0f", " + 2.5f")
    torch._dynamo.reset()
    page = tmp_path / "report.html"
    words = [f"{program}:scaled", "--shape", "9,134", "--shape", "134", "--option", "graph_cache=no"]
    for command in ("verify", "bisect"):
        assert main([command, *words, "--html", str(page)]) == 1
        assert '"finding":{"command":"' + command + '","good":false,' in page.read_text(encoding="utf-8")


def test_options_reach_kernels_that_are_generated_ahead_of_time(program, capsys):
    words = [f"{program}:keyed", "--shape", "8,16", "--kwarg", "weight=[16]", "--kwarg", "scale=0.25"]
    words += ["--kwarg", "held=[8,16]:bool", "--target", "triton", "--dtype", "float16"]
    texts = []
    for option in ("default", "strict"):
        assert main(["kernels", *words, "--option", f"numerics={option}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


def test_explain_certifies_and_exits_with_1_where_the_certificate_does_not_hold(program, monkeypatch, capsys):
    words = ["explain", f"{program}:scaled", "--shape", "9,132", "--shape", "132", "--verify"]
    assert main(words) == 0
    assert "certificate: holds" in capsys.readouterr().out
    plant(monkeypatch, " + 2.0f", " + 2.5f")
    torch._dynamo.reset()
    words = ["explain", f"{program}:scaled", "--shape", "9,133", "--shape", "133", "--verify"]
    assert main([*words, "--json", "--option", "graph_cache=no"]) == 1
    found = json.loads(capsys.readouterr().out)["certificate"]
    assert not found["holds"] and not found["launches"][0]["right"]
    assert main(["explain", f"{program}:dropped", "--shape", "40", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "certificate: holds" in shown and "note: not compared with eager, as it is random: result" in shown


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


def test_kernels_are_generated_for_an_architecture(program, capsys):
    assert main(["kernels", f"{program}:Net", "--shape", "4,16", "--target", "triton", "--arch", "sm_80"]) == 0
    assert "@triton.jit" in capsys.readouterr().out


def test_explain_reports_for_another_device(program, capsys):
    assert (
        main(["explain", f"{program}:Net", "--shape", "4,16", "--target", "triton", "--arch", "sm_80", "--json"]) == 0
    )
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert "A100" in graph["device"]["name"] or "sm_80" in graph["device"]["name"]


def test_ptx_prints_a_stage(program, capsys):
    words = ["ptx", f"{program}:Net", "--shape", "4,16"]
    assert main([*words, "--arch", "sm_90"]) == 0
    assert ".target sm_90" in capsys.readouterr().out
    assert main([*words, "--arch", "sm_80", "--stage", "ttir", "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)
    assert "tt.func" in kernel["text"]
    assert main([*words, "--target", "c"]) == 0
    assert ".text" in capsys.readouterr().out
    assert main([*words, "--target", "c", "--stage", "ptx"]) == 2
    assert "there is no stage 'ptx'" in capsys.readouterr().err


def test_kernels_are_printed_as_json(program, capsys):
    assert main(["kernels", f"{program}:scaled", "--shape", "8,128", "--shape", "128", "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)
    assert kernel["name"] == "relu_mul_add" and "for" in kernel["text"]


def test_bench_measures_each_kernel_and_call(program, capsys):
    words = ["bench", f"{program}:layered", "--shape", "64,64"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ +\d+\.\d +\d+% +\d+\.\d +\d+\.\d +\d+\.\d +\d+% +2  relu$", shown, re.MULTILINE)
    assert re.search(r"aten\.mm\.default$", shown, re.MULTILINE)
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["launches"] for row in found["measured"]} == {"relu": 2, "aten.mm.default": 2}
    assert main(["bench", f"{program}:untouched", "--shape", "4"]) == 1


def test_programs_take_keyword_arguments(program, capsys):
    words = [f"{program}:keyed", "--shape", "8,16", "--kwarg", "weight=[16]", "--kwarg", "scale=0.25"]
    words += ["--kwarg", "held=[8,16]:bool"]
    for command in ("explain", "accuracy", "kernels", "verify", "bisect"):
        assert main([command, *words]) == 0
        assert capsys.readouterr().out
    assert main(["time", *words, "--rounds", "2", "--train"]) == 0
    assert main(["kernels", *words, "--target", "triton"]) == 0
    assert "0.25" in capsys.readouterr().out
    assert main(["verify", *words, "--train", "--json"]) == 0
    names = {value["name"] for value in json.loads(capsys.readouterr().out)["values"]}
    assert names == {"result", "gradient of input[0]", "gradient of input['weight']"}


def test_exported_programs_are_taken_from_their_files(tmp_path, capsys):
    exported = torch.export.export(torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh()), (torch.randn(4, 16),))
    file = str(tmp_path / "model.pt2")
    torch.export.save(exported, file)
    for command in ("explain", "verify", "kernels"):
        assert main([command, file]) == 0
        assert "tanh" in capsys.readouterr().out or command == "verify"
    assert main(["explain", file, "--shape", "4,16"]) == 0
    assert main(["explain", file, "--shape", "4,17"]) == 2
    assert "the program failed on (4, 17)" in capsys.readouterr().err


def test_a_program_may_be_in_a_module_of_a_package(program, tmp_path, monkeypatch, capsys):
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text(Path(program).read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "own_package.model:Net", "--shape", "4,16"]) == 0
    assert "tanh" in capsys.readouterr().out
    assert main(["explain", "own_package.absent:Net", "--shape", "4,16"]) == 2
    assert "there is no module 'own_package.absent'" in capsys.readouterr().err
    (package / "broken.py").write_text("import no_such_module_at_all\n")
    assert main(["explain", "own_package.broken:Net"]) == 2
    assert "cannot be imported: ModuleNotFoundError" in capsys.readouterr().err


def test_explain_compiles_backward_on_request(program, capsys):
    assert main(["explain", f"{program}:Net", "--shape", "4,16", "--train"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^forward: ", shown, re.MULTILINE) and re.search(r"^backward: ", shown, re.MULTILINE)


def test_options_reach_the_compilation(program, capsys):
    words = ["kernels", f"{program}:Net", "--shape", "4,16", "--option", "target=reference", "--dynamic"]
    assert main(words) == 0
    assert re.search(r"kernel \w+\(", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["explain", "accuracy", "verify", "bisect"])
def test_results_are_printed_as_json(program, command, capsys):
    assert main([command, f"{program}:scaled", "--shape", "8,128", "--shape", "128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    match command:
        case "explain":
            assert found["graphs"][0]["steps"][0]["name"] == "relu_mul_add"
        case "accuracy":
            assert found["launches"][0]["is_right"] is True
        case "verify":
            assert found["agrees"] is True and found["values"][0]["name"] == "result"
        case _:
            assert found["agrees"] is True and found["culprit"] == ""


def plant(monkeypatch, before, after):
    """Emit C with another text, for a program that no other test builds."""
    emit = CTarget.emit
    monkeypatch.setattr(CTarget, "emit", lambda self, kernel: emit(self, kernel).replace(before, after))


def test_verify_and_bisect_exit_with_1_where_results_differ(program, monkeypatch, capsys):
    words = [f"{program}:scaled", "--shape", "9,130", "--shape", "130"]
    assert main(["verify", *words]) == 0
    plant(monkeypatch, " + 2.0f", " + 2.5f")
    torch._dynamo.reset()
    words = [f"{program}:scaled", "--shape", "9,131", "--shape", "131", "--option", "graph_cache=no"]
    assert main(["verify", *words]) == 1
    assert re.search(r"DIFFERS: result: at most 5\.0e-01 from eager", capsys.readouterr().out)
    assert main(["verify", *words, "--atol", "0.6"]) == 0
    assert main(["bisect", *words]) == 1
    assert "kernel relu_mul_add, out0" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "bisect"])
def test_a_comparison_of_nothing_fails(program, command, capsys):
    assert main([command, f"{program}:untouched", "--shape", "4"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("note: no kernel was generated: eager was compared with itself") == 1 and not shown.err
    assert main([command, f"{program}:untouched", "--shape", "4", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"] and not found["compiled"]


def test_gradients_are_verified(program, capsys):
    assert main(["verify", f"{program}:Net", "--shape", "4,16", "--train"]) == 0
    shown = capsys.readouterr().out
    for name in ("result", "gradient of input[0]", "gradient of inner.weight"):
        assert f"agrees: {name}: " in shown


def test_programs_that_cannot_be_compared_are_refused(program, capsys):
    assert main(["verify", f"{program}:dropped", "--shape", "40"]) == 2
    assert "draws random numbers" in capsys.readouterr().err
    words = ["verify", f"{program}:fussy", "--shape", "4,4", "--rtol", "1e-3"]
    assert main([*words, "--against", "float64"]) == 2
    assert "does not run in float64" in capsys.readouterr().err
    assert main(words) == 0
    assert "note: the program does not run in float64" in capsys.readouterr().out


def test_time_compares_sides(program, capsys):
    words = ["time", f"{program}:scaled", "--shape", "8,128", "--shape", "128", "--rounds", "3"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^fusion +\d+\.\d+ [µm]s +\d.* to .*\d+\.\d\dx +\d+\.\d\d s$", shown, re.MULTILINE)
    assert "forward; 3 rounds in turn" in shown
    assert main([*words, "--train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    eager, fused = found["sides"]
    assert (eager["name"], fused["name"], eager["first_call_s"]) == ("eager", "fusion", None)
    assert fused["rounds"] == 3 and fused["times_as_fast_as_eager"] == eager["median_s"] / fused["median_s"]


def test_time_says_where_nothing_was_compiled(program, capsys):
    assert main(["time", f"{program}:untouched", "--shape", "4", "--rounds", "2"]) == 1
    assert "no kernel was generated" in capsys.readouterr().out


@pytest.mark.slow
def test_time_compares_with_inductor(program, capsys):
    words = ["time", f"{program}:Net", "--shape", "8,16", "--rounds", "2", "--compare", "inductor"]
    assert main(words) == 0
    assert re.search(r"^inductor .* s$", capsys.readouterr().out, re.MULTILINE)


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
