"""Definitions that differ in another process under the same names change the key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fusion.graph_cache.changing import PROGRAMS

ROOT = Path(__file__).resolve().parents[3]


def test_no_process_loads_the_compilation_of_other_functions():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for factor in ("2", "3"):
        command = [sys.executable, str(ROOT / "tests/fusion/graph_cache/changing.py"), factor]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [f"{name}: right" for name in PROGRAMS]
