"""Arguments of the command line: what is refused, and how; help and completion."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import pytest
import torch

from fusion import cli
from fusion.cli import main
from fusion.cli.arguments import TARGETS as NAMED


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["explain", "nothing"], "names no program", "FILE.py:NAME"),
        (["explain", "absent.py:f"], "there is no file", "looked in"),
        (["explain", "PROGRAM:absent"], "has nothing called 'absent'", "scaled"),
        (["explain", "PROGRAM:FACTOR"], "'FACTOR' in PROGRAM is of the type float, which cannot be run", "scaled"),
        (["explain", "PROGRAM:Needy"], "cannot be instantiated", "takes no arguments"),
        (["explain", "PROGRAM:scaled", "--shape", "8,x"], "is no shape", "--shape 8,128"),
        (["explain", "PROGRAM:scaled", "--shape", "8", "--dtype", "f"], "unknown dtype", "float32"),
        (
            ["explain", "PROGRAM:scaled", "--shape", "8", *["--dtype", "int8"] * 2],
            "2 times --dtype for 1 times",
            "one per",
        ),
        (["explain", "PROGRAM:scaled", "--shape", "8"], "the program failed on (8,)", "one --shape per input"),
        (["explain", "PROGRAM:scaled", "--shape", "3", "--shape", "4"], "the program failed", "--shape"),
        (
            ["explain", "PROGRAM:scaled", "--shape", "3", "--device", "nowhere"],
            "'nowhere' cannot be used",
            "needs no GPU",
        ),
        (["explain", "PROGRAM:scaled", "--shape", f"0,{1 << 70}"], "cannot be allocated", "smaller sizes"),
        (["explain", "PROGRAM:scaled", "--shape", f"0,{1 << 40},{1 << 40}"], "more than 63 bits", "smaller sizes"),
        (["explain", "PROGRAM:Net", "--kwarg", "x={[]: 1}"], "'{[]: 1}', of x, is no value", "Python value"),
        (["explain", "PROGRAM:leaves", "--shape", "3"], "it ends the process, with exit code 3", "one --shape"),
        (["explain", "PROGRAM:Leaves"], "cannot be instantiated: it ends the process, with exit code 0", "nn.Module"),
        (["explain", "LEAVING:f"], "cannot be imported: it ends the process, with exit code 4", "as Python runs it"),
        (["explain", "PROGRAM:Net", "--option", "workspace=-1"], "must be positive", "--help"),
        (["verify", "PROGRAM:sparse", "--shape", "3,4"], "result is sparse", "dense"),
        (["bisect", "PROGRAM:untouched", "--shape", "3", "--device", "meta"], "on the device 'meta'", "with numbers"),
    ],
)
def test_errors_have_a_message_a_hint_and_code_2(program, arguments, message, hint, capsys, tmp_path):
    (leaving := tmp_path / "leaving.py").write_text("raise SystemExit(4)")
    words = [word.replace("PROGRAM", program).replace("LEAVING", str(leaving)) for word in arguments]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("fusion: error: ")
    assert message.replace("PROGRAM", program) in shown
    assert hint in shown.partition("hint:")[2]
    assert "Traceback" not in shown


PROGRAMS = ("explain", "accuracy", "kernels", "ptx", "bench", "verify", "bisect", "time")
"""The commands that take a program."""


@pytest.mark.parametrize("command", PROGRAMS)
@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["nothing"], "names no program", "package.module:NAME"),
        (["absent.py:f"], "there is no file 'absent.py'", "looked in"),
        (["folder/absent:f"], "there is no file 'folder/absent'", "looked in"),
        (["no_such.module:f"], "there is no module 'no_such.module'", "sys.path"),
        (["PROGRAM:absent"], "has nothing called 'absent'", "scaled"),
        (["PROGRAM:scaled", "--shape", "8", "--shape", "x"], "is no shape", "--shape 8,128"),
        (["PROGRAM:scaled", "--shape", "8", "--shape", "9"], "the program failed on (8,)", "one --shape per input"),
        (["PROGRAM:scaled", "--shape", "99999999999,9", "--shape", "9"], "cannot be allocated", "smaller sizes"),
        (["PROGRAM:scaled", "--shape", str(1 << 70), "--shape", "9"], "cannot be allocated", "smaller sizes"),
        (["PROGRAM:large", "--shape", ""], "the program failed", "--shape"),
        (["PROGRAM:Net", "--kwarg", "scale"], "'scale' is no keyword argument", "NAME=VALUE"),
        (["PROGRAM:Net", "--kwarg", "1x=2"], "'1x=2' is no keyword argument", "NAME=VALUE"),
        (["PROGRAM:Net", "--kwarg", "x=two"], "'two', of x, is no value", "Python value"),
        (["PROGRAM:Net", "--kwarg", "x=[4,y]"], "'4,y' is no shape", "--shape 8,128"),
        (["PROGRAM:Net", "--kwarg", "x=[4]:f4"], "unknown dtype 'f4'", "float32"),
        (["PROGRAM:Net", "--kwarg", "x=[99999999999,9]"], "cannot be allocated", "smaller sizes"),
        (["PROGRAM:Net", "--shape", "4,16", "--kwarg", "y=3"], "unexpected keyword argument 'y'", "--shape"),
        (["DIRECTORY:f"], "is a directory", "FILE.py:NAME"),
        (["BROKEN:f"], "cannot be imported: SyntaxError: ", "as Python runs it"),
        (["broken_package.model:f"], "cannot be imported: RuntimeError: half installed", "as Python runs it"),
        (["absent.pt2"], "there is no file 'absent.pt2'", "looked in"),
        (["DAMAGED.pt2"], "is no exported program", "torch.export.save"),
        (["PROGRAM:Net", "--shape", "4,16", "--device", "nowhere"], "'nowhere' cannot be used", "needs no GPU"),
    ],
)
def test_every_command_refuses_wrong_arguments(
    program, command, arguments, message, hint, tmp_path, capsys, monkeypatch
):
    (damaged := tmp_path / "damaged").with_suffix(".pt2").write_bytes(b"nothing")
    (broken := tmp_path / "broken.py").write_text("def f(x:")
    (package := tmp_path / "broken_package").mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    names = {"PROGRAM": program, "DAMAGED": str(damaged), "DIRECTORY": str(tmp_path), "BROKEN": str(broken)}
    words = [reduce(lambda text, name: text.replace(name, names[name]), names, word) for word in arguments]
    assert main([command, *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("fusion: error: ") and shown.err.count("fusion: error") == 1
    assert len(shown.err.splitlines()) <= 3, "a message, a place and a hint"
    assert message in shown.err
    assert hint in shown.err.partition("hint:")[2]
    assert "Traceback" not in shown.err and not shown.out


@pytest.mark.parametrize("command", [each for each in PROGRAMS if each != "ptx"])
@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["PROGRAM:Net", "--shape", "4,16", "--mode", "fast"], "unknown mode 'fast'; known: default", "--help"),
        (["PROGRAM:Net", "--shape", "4,16", "--option", "strict"], "'strict' is no option", "key=value"),
        (["PROGRAM:Net", "--shape", "4,16", "--option", "speed=1"], "unknown option 'speed'; known: ", "--help"),
        (
            ["PROGRAM:Net", "--shape", "4,16", "--option", "workspace=x"],
            "workspace must be a number of bytes",
            "--help",
        ),
        (["PROGRAM:Net", "--shape", "4,16", "--option", "strict=maybe"], "strict must be a bool", "--help"),
        (["PROGRAM:Net", "--shape", "4,16", "--option", "target=metal"], "unknown target 'metal'", "--help"),
    ],
)
def test_every_command_that_compiles_refuses_wrong_settings(program, command, arguments, message, hint, capsys):
    assert main([command, *(word.replace("PROGRAM", program) for word in arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("fusion: error: ") and shown.err.count("fusion: error") == 1
    assert message in shown.err
    assert hint in shown.err.partition("hint:")[2]
    assert "Traceback" not in shown.err and not shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--rtol", "x"], "'x' is no number"),
        (["bisect", "--atol", "-1"], "-1 is no tolerance"),
        (["verify", "--rtol", "nan"], "nan is no tolerance"),
        (["verify", "--against", "float32"], "invalid choice: 'float32'"),
        (["time", "--rounds", "1"], "1 must be at least 2"),
        (["time", "--rounds", "few"], "'few' is no number"),
        (["time", "--compare", "tvm"], "invalid choice: 'tvm'"),
        (["kernels", "--target", "metal"], "invalid choice: 'metal'"),
        (["explain", "--seed", "x"], "'x' is no number"),
        (["explain", "--seed", str(1 << 63)], "is no seed"),
        (["time", "--html", "absent/page.html"], "there is no directory absent"),
        (["time", "--html", "."], "'.' is no file"),
        (["time", "--html", ""], "'' is no file"),
        (["explain", "--dump", "/dev/null/x"], "'/dev/null/x' cannot be written: Not a directory"),
        (["accuracy", "--html", "x"], "unrecognized arguments: --html"),
        (["ptx", "--train"], "unrecognized arguments: --train"),
    ],
)
def test_arguments_that_cannot_be_parsed_are_refused_with_code_2(program, arguments, message, capsys):
    command, *rest = arguments
    with pytest.raises(SystemExit) as stopped:
        main([command, f"{program}:Net", "--shape", "4,16", *rest])
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err and "usage" not in shown.err and not shown.out
    assert shown.err.startswith("fusion: error: ") and "--help" in shown.err.partition("hint:")[2]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--device", "cuda"], "there is no GPU that PyTorch can use", "fusion doctor"),
        (["--device", "cpu"], "the cache directory /dev/null/x cannot be used", "FUSION_CACHE_DIR"),
    ],
)
def test_calibrate_says_why_it_cannot(arguments, message, hint, capsys, monkeypatch):
    monkeypatch.setenv("FUSION_CACHE_DIR", "/dev/null/x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"fusion: error: {message}") and hint in shown.partition("hint:")[2]
    assert len(shown.splitlines()) == 2


def test_an_interrupted_command_says_so(program, capsys):
    assert main(["explain", f"{program}:waits", "--shape", "3"]) == 130
    assert capsys.readouterr().err == "fusion: interrupted\n"


@pytest.mark.parametrize(
    ("command", "word"),
    [("doctor", "x"), ("cache", "--clean"), ("calibrate", "--device=tpu"), ("completion", "tcsh")],
)
def test_commands_about_the_machine_refuse_other_arguments(command, word, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, word])
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "kernels", "ptx"])
@pytest.mark.parametrize("arch", ["sm_999", "gfx9999", "sm90", "sm_33", "h100", ""])
def test_unknown_architectures_are_refused_before_any_output(program, command, arch, capfd):
    assert main([command, f"{program}:Net", "--shape", "4,16", "--target", "triton", "--arch", arch]) == 2
    shown = capfd.readouterr()
    assert not shown.out
    assert shown.err.startswith(f"fusion: error: unknown architecture {arch!r}")
    assert "known: sm_70, " in shown.err and "gfx942" in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "sm_90"], "--arch is for kernels that are generated ahead of time"),
        (["--target", "c", "--arch", "sm_90"], "the c target builds for this machine only"),
        (["--target", "c", "--train"], "--train does not go with --target"),
        (["--target", "c", "--option", "cudagraphs=yes"], "--option cudagraphs=yes does not go with --target"),
        (["--target", "c", "--option", "target=c"], "--option target=c does not go with --target"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(program, words, message, capsys):
    assert main(["kernels", f"{program}:Net", "--shape", "4,16", *words]) == 2
    assert message in capsys.readouterr().err


def test_ahead_of_time_commands_take_no_measurement(program, capsys):
    words = ["explain", f"{program}:Net", "--shape", "4,16", "--target", "triton"]
    for word in ("--measure", "--verify", "--times", "--dynamic"):
        assert main([*words, word]) == 2
        assert f"{word} does not go with --target" in capsys.readouterr().err
    assert main([*words, "--kwarg", "target=1"]) == 2  # of the program, which takes none
    assert "the program failed" in capsys.readouterr().err


COMPILED = {"--train", "--mode", "--dynamic", "--option"}
TAKEN = {
    "explain": {*COMPILED, "--target", "--arch", "--json", "--html"},
    "kernels": {*COMPILED, "--target", "--arch", "--json", "--html"},
    "ptx": {"--option", "--target", "--arch", "--json", "--html"},  # for inference, ahead of time
    "accuracy": {*COMPILED, "--json"},  # `explain --verify --html` shows more
    "bench": {*COMPILED, "--json", "--html"},
    "verify": {*COMPILED, "--json", "--html"},
    "bisect": {*COMPILED, "--json", "--html"},
    "time": {*COMPILED, "--json", "--html"},
    "doctor": {"--json"},
    "calibrate": {"--json"},
    "cache": {"--json"},
    "demo": set[str](),
    "completion": set[str](),
}
"""Which of these options each command takes: all those that mean something there."""


def test_every_command_takes_the_options_that_mean_something_there():
    asked = {option for options in TAKEN.values() for option in options}
    taken = {
        name: {word for action in parser._actions for word in action.option_strings} & asked
        for name, parser in commands()
    }
    assert taken == TAKEN


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_command_and_option(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, parser in commands():
        assert name in script
        for action in parser._actions:
            for option in action.option_strings:
                assert option.lstrip("-") in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n" if shell != "fish" else "--no-execute"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["fusion", "ex"], {"explain"}),
        (["fusion", "explain", "--ver"], {"--verify"}),
        (["fusion", "kernels", "--target", ""], set(NAMED)),
        (["fusion", "completion", "z"], {"zsh"}),
        (["fusion", "explain", "user_"], {"user_program.py"}),
    ],
)
def test_bash_completes(program, line, expected, capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = " ".join(f"'{word}'" for word in line)
    script += f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _fusion; printf '%s\n' \"${{COMPREPLY[@]}}\"\n"
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True, cwd=Path(program).parent)
    assert {*done.stdout.split()} == expected


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    (choices,) = (each for each in cli.parser()._actions if isinstance(each, argparse._SubParsersAction))
    yield from choices.choices.items()


def test_every_command_has_examples_that_parse_and_exit_codes():
    known = dict(commands())
    assert known.keys() == {*PROGRAMS, "demo", "doctor", "cache", "calibrate", "completion"}
    for name, parser in known.items():
        text = parser.format_help()
        examples = re.findall(r"^  fusion (.*)$", text, re.MULTILINE)
        assert examples and all(example.split()[0] == name for example in examples)
        for example in examples:
            assert cli.parser().parse_args(example.partition(" >")[0].split()).command == name
        assert re.search(r"exit codes:\n  0 .*\n  1 .*\n  2 ", text)


def test_errors_name_the_line_of_the_program(program, tmp_path, capsys):
    assert main(["explain", f"{program}:scaled", "--shape", "3", "--shape", "4"]) == 2
    assert "at: scaled (" in capsys.readouterr().err
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\n\nnumber = torch.ones(2) @ torch.ones(3)\n")
    assert main(["explain", f"{broken}:number"]) == 2
    assert "at: <module> (broken.py:3)" in capsys.readouterr().err
