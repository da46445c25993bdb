"""The example that steps through a kernel: it needs Triton's interpreter, which this process has chosen."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/step_through.py"


def test_the_kernel_stops_and_shows_its_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("fusion_triton_")]:
        monkeypatch.delitem(sys.modules, name)  # the example steps through the only kernel of its process
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    assert "the kernel stopped" in shown and "the result agrees with eager" in shown


def test_the_example_chooses_the_interpreter_before_triton_is_imported() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert text.index('os.environ["TRITON_INTERPRET"] = "1"') < text.index("import torch")
