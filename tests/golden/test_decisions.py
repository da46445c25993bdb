"""Decisions for some 70 programs are recorded as text, so that a change of a decision shows as a diff.

    pytest tests/golden --refresh-goldens     writes the texts again

Each text has, for one program on one target, its kernels and library calls, their configurations and predicted times,
and a hash of each generated source.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.golden.models import MODELS
from tests.golden.programs import PROGRAMS
from tests.golden.recording import TARGETS, decisions, versions

TEXTS = Path(__file__).parent / "decisions"
RELEASES = TEXTS / "releases.json"


@pytest.mark.parametrize("folder", TARGETS)
@pytest.mark.parametrize("name", [*PROGRAMS, *MODELS])
def test_decisions_agree_with_the_record(
    name: str, folder: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    refresh = request.config.getoption("--refresh-goldens")
    if torch.cuda.is_available():
        pytest.skip("recorded on a machine without a GPU")
    if not refresh and (recorded := json.loads(RELEASES.read_text())) != versions():
        pytest.skip(f"recorded with {recorded}")
    text = decisions(PROGRAMS.get(name) or MODELS[name], TARGETS[folder], monkeypatch)
    path = TEXTS / folder / f"{name}.txt"
    if refresh:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        RELEASES.write_text(json.dumps(versions(), indent=1) + "\n")
    assert text.splitlines() == path.read_text().splitlines()


def test_every_text_is_of_a_program() -> None:
    results = {path.relative_to(TEXTS).as_posix() for path in TEXTS.rglob("*.txt")}
    assert results == {f"{folder}/{name}.txt" for folder in TARGETS for name in [*PROGRAMS, *MODELS]}
