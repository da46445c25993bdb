"""accelerate: a fused model that it prepares, and a model that it compiles through its plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.backend import backend_of
from tests.frameworks.training import CLASSES, WIDTH, model

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin

ROWS = 24


class FusionPlugin(TorchDynamoPlugin):
    """As in docs/recipes/accelerate.md: accelerate has a fixed list of backends, which this is not one of."""

    def to_kwargs(self) -> dict[str, Any]:
        return {**super().to_kwargs(), "backend": fusion.fusion_backend, "options": {"strict": True}}


def trained(network: nn.Module, **settings: Any) -> tuple[Accelerator, nn.Module, list[Tensor]]:
    """The accelerator, the prepared model, and losses and parameters of two epochs with clipped gradients."""
    AcceleratorState._reset_state(True)  # a process has one precision
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **settings)
    draws = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, WIDTH, generator=draws, dtype=next(network.parameters()).dtype)
    data = torch.utils.data.TensorDataset(rows, torch.randint(CLASSES, (ROWS,), generator=draws))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    prepared, optimizer, batches = accelerator.prepare(
        network, optimizer, torch.utils.data.DataLoader(data, batch_size=6)
    )
    losses = []
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(prepared):
                loss = nn.functional.cross_entropy(prepared(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return accelerator, prepared, [torch.stack(losses), *(each.detach() for each in network.parameters())]


def assert_kernels(module: nn.Module) -> None:
    report = fusion.report(module)
    assert {graph.label for graph in report.graphs} == {"forward", "backward"}
    assert all(graph.kernels and not graph.externs for graph in report.graphs)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}])
def test_a_fused_model_that_is_prepared(settings: dict[str, Any], checkpointed: bool) -> None:
    fused = fusion.fuse(model(checkpointed=checkpointed), options={"strict": True})
    close = {"rtol": 3e-2, "atol": 3e-2} if "mixed_precision" in settings else {"rtol": 1e-8, "atol": 1e-9}
    _, prepared, ours = trained(fused, **settings)
    torch.testing.assert_close(ours, trained(model(checkpointed=checkpointed), **settings)[2], **close)
    assert isinstance(prepared, type(fused))
    assert_kernels(fused)


@pytest.mark.parametrize("regional", [False, True])
def test_a_model_that_is_compiled_by_the_plugin(regional: bool, tmp_path: Path) -> None:
    """As a whole, or each of its equal blocks alone, of which the first is compiled for all."""
    network = model()
    plugin = FusionPlugin(backend="eager", use_regional_compilation=regional)
    accelerator, prepared, ours = trained(network, dynamo_plugin=plugin)
    torch.testing.assert_close(ours, trained(model())[2], rtol=1e-8, atol=1e-9)
    for part in prepared.blocks if regional else [prepared]:
        assert_kernels(part)
    if regional:
        own = [part for part in prepared.blocks if (backend := backend_of(part)) is not None and backend.reports]
        assert len(own) == 2  # for an input without gradients, and with, which the others share
    plain = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    assert {*plain.state_dict()} == {*model().state_dict()}
    accelerator.save_state(str(tmp_path))
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    torch.testing.assert_close(plain.state_dict(), state, rtol=0, atol=0)


def test_a_backend_by_name_is_refused_by_accelerate() -> None:
    """If this fails, accelerate takes the name, and the recipe can drop its plugin."""
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        Accelerator(cpu=True, dynamo_backend="fusion")
