"""The modules that `import fusion` loads, each in a separate process."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fusion

HEAVY = ("torch", "triton", "sympy", "networkx", "numpy")


def run(program: str) -> str:
    """The output of a Python process that runs `program`."""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_the_package_loads_the_compiler_at_the_first_use_of_a_name() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import fusion
assert not {*fusion.__all__} - {*dir(fusion)}
print(*sorted(set(sys.modules) - before))
from fusion import *
assert {*fusion.__all__} <= {*globals()} and fuse is fusion.fuse
"""
    assert run(program).split() == ["fusion"]


def test_every_name_is_there_once_it_is_asked_for() -> None:
    homes = import_module("fusion")._HOMES
    assert sorted(name for names in homes.values() for name in names) == sorted(fusion.__all__)
    for module, names in homes.items():
        for name in names:
            assert getattr(fusion, name) is getattr(import_module(module), name)
            assert getattr(fusion, name).__module__ == module


def test_a_type_checker_sees_the_names_where_they_are() -> None:
    source = ast.parse(Path(str(fusion.__file__)).read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(source) if isinstance(node, ast.ImportFrom) and node.module != "typing")
    seen = {str(node.module): tuple(alias.name for alias in node.names) for node in imports}
    assert seen == import_module("fusion")._HOMES


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'fusion' has no attribute 'fused'"):
        _ = fusion.fused  # type: ignore[attr-defined]


def test_the_backend_is_registered_without_an_import_of_the_package() -> None:
    program = """
import sys, torch
assert "fusion" in torch._dynamo.list_backends(), "not installed"
assert "fusion" not in sys.modules
compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="fusion", options={"strict": True})
assert compiled(torch.tensor([-1.0, 2.0])).tolist() == [1, 3]
print(sys.modules["fusion"].__name__)
"""
    assert run(program).split() == ["fusion"]


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["kernels", "--help"]])
def test_the_command_line_explains_itself_without_the_compiler(words: list[str]) -> None:
    program = f"""
import sys
from fusion.cli import main
try:
    main({words!r})
except SystemExit as stopped:
    assert stopped.code == 0
print("loaded:", *sorted({{*{HEAVY!r}}} & {{*sys.modules}}))
"""
    assert run(program).splitlines()[-1].strip() == "loaded:"
