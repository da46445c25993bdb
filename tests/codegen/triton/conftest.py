"""A stand-in for a device, on machines without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The current device, and its current stream."""
    state = {"device": 0, "stream": 7}
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state["device"], raising=False)

    def stream_of(device: int) -> int:
        return 100 * device + state["stream"]

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream_of, raising=False)
    return state
