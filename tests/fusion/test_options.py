"""Options: allowed values, and the errors for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion.options import Options


def test_options_of_a_call_are_read() -> None:
    options = {"dump": "dumps", "workspace": 5, "strict": True, "target": None, "numerics": "strict"}
    read = Options.read("reduce-overhead", options)
    assert read == Options(
        mode="reduce-overhead", dump=Path("dumps"), strict=True, workspace=5, numerics="strict", cudagraphs=True
    )


WRONG = {
    "mode": ("fast", None, ValueError, "unknown mode 'fast'; known: default, reduce-overhead, max-autotune"),
    "key": (None, {"modes": 1}, ValueError, "unknown option 'modes'; known: close_calls, cudagraphs, dump"),
    "target": (None, {"target": "metal"}, ValueError, "unknown target 'metal'; known: c"),
    "numerics": (
        None,
        {"numerics": True},
        ValueError,
        "unknown numerics True; known: default, strict, batch",
    ),
    "path": (None, {"dump": 3}, TypeError, "dump must be a path, got int"),
    "edits": (None, {"override": 3}, TypeError, "override must be a path, got int"),
    "no edits": (None, {"override": "missing"}, ValueError, "override must be a directory that exists, and missing is"),
    "bytes": (None, {"workspace": True}, TypeError, "workspace must be a number of bytes, got bool"),
    "no bytes": (None, {"workspace": 0}, ValueError, "workspace must be positive, got 0"),
    "flag": (None, {"strict": 1}, TypeError, "strict must be a bool, got int"),
    "mapping": (None, ["strict"], TypeError, "options must be a mapping, got list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_wrong_option(case: str) -> None:
    mode, options, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        Options.read(mode, options)


@pytest.mark.parametrize("variable", ["FUSION_STRICT", "FUSION_GRAPH_CACHE"])
@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON", "0", "false", "False", "no", "off", " off ", "", None])
def test_a_switch_of_the_environment_is_on_or_off(
    monkeypatch: pytest.MonkeyPatch, variable: str, word: str | None
) -> None:
    name = variable.removeprefix("FUSION_").lower()
    monkeypatch.delenv(variable, raising=False)
    expected = name == "graph_cache"
    if word is not None:
        monkeypatch.setenv(variable, word)
        expected = word.lower() in ("1", "true", "yes", "on")
    assert getattr(Options.read(), name) is expected
    assert getattr(Options.read(None, {name: not expected}), name) is not expected


@pytest.mark.parametrize("variable", ["FUSION_STRICT", "FUSION_GRAPH_CACHE", "FUSION_PROGRESS"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "maybe")
    with pytest.raises(ValueError, match=f"unknown {variable}='maybe'; known: 1, true, yes, on, 0, false, no, off"):
        Options.read()
