"""Options: what a call may say, and what it is told where it says something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion.options import Options


def test_a_call_says_what_is_to_be() -> None:
    options = {"dump": "dumps", "workspace": 5, "strict": True, "target": None, "numerics": "strict"}
    read = Options.read("reduce-overhead", options)
    assert read == Options(
        mode="reduce-overhead", dump=Path("dumps"), strict=True, workspace=5, numerics="strict", cudagraphs=True
    )


WRONG = {
    "mode": ("fast", None, ValueError, "unknown mode 'fast'; known: default, reduce-overhead, max-autotune"),
    "key": (None, {"modes": 1}, ValueError, "unknown option 'modes'; known: cudagraphs, dump"),
    "target": (None, {"target": "metal"}, ValueError, "unknown target 'metal'; known: c"),
    "numerics": (None, {"numerics": True}, ValueError, "unknown numerics True; known: default, strict"),
    "path": (None, {"dump": 3}, TypeError, "dump must be a path, got int"),
    "bytes": (None, {"workspace": True}, TypeError, "workspace must be a number of bytes, got bool"),
    "no bytes": (None, {"workspace": 0}, ValueError, "workspace must be positive, got 0"),
    "flag": (None, {"strict": 1}, TypeError, "strict must be a bool, got int"),
    "mapping": (None, ["strict"], TypeError, "options must be a mapping, got list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    mode, options, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        Options.read(mode, options)
