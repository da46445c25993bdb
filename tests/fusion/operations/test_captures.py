"""Tensors that the capture at hand has computed are known, and no others."""

from __future__ import annotations

import pytest
import torch

from fusion.operations import captures
from fusion.operations.captures import CapturedStorages


def storages(*tensors: torch.Tensor) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def test_tensors_of_the_capture_at_hand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, first, second, third = CapturedStorages(), torch.ones(3), torch.ones(3), torch.ones(3)
    capture: list[int | None] = [7]
    monkeypatch.setattr(captures, "current_capture", lambda: capture[0])
    computed.note(storages(first))
    computed.note(storages(second))
    assert [computed.has(tensor) for tensor in (first, second.view(3, 1), third)] == [True, True, False]
    capture[0] = 8
    assert not computed.has(first)
    computed.note(storages(third))
    assert [computed.has(tensor) for tensor in (first, second, third)] == [False, False, True]


def test_nothing_is_known_where_captures_cannot_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, tensor = CapturedStorages(), torch.ones(3)
    monkeypatch.setattr(captures, "current_capture", lambda: None)
    computed.note(storages(tensor))
    assert not computed.has(tensor)


def test_without_a_driver_there_is_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_capture_of", lambda: None)
    assert captures.current_capture() is None
