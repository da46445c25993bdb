"""When an accelerator's target is prewarmed, once in a process."""

from __future__ import annotations

import pytest
import torch

import fusion
import fusion.calls.prewarm


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the order of events, with a device whose target cannot be prepared."""
    order: list[str] = []

    def prepare(device_type: str) -> None:
        order.append(device_type)
        raise RuntimeError("no such device")

    def captured(backend: fusion.Backend, graph: object, inputs: object, **_: object) -> object:
        order.append("traced")
        return graph

    monkeypatch.setattr(fusion.calls.prewarm, "prepare", prepare)
    monkeypatch.setattr(fusion.Backend, "__call__", captured)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return order


def test_prewarming_starts_with_dynamo_if_an_accelerator_is_in_use(order: list[str]) -> None:
    """A failure of the preparation does not make Dynamo fail."""
    for _ in range(2):
        assert torch.compile(torch.exp, backend="fusion")(torch.zeros(2)).sum() == 2
        torch._dynamo.reset()
    assert order == ["cuda", "traced"] * 2


def test_no_prewarming_without_an_accelerator(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert fusion.fuse(torch.exp)(torch.zeros(2)).sum() == 2
    assert order == ["traced"]


def test_no_prewarming_for_other_backends(order: list[str]) -> None:
    assert torch.compile(torch.exp, backend="eager")(torch.zeros(2)).sum() == 2
    assert not order
