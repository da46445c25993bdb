"""Lightning: a fused network, a compiled training step, precision, accumulation and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.backend import backend_of
from tests.frameworks.training import CLASSES, WIDTH, model

pytest.importorskip("lightning")
import lightning

ROWS = 24


class Classifier(lightning.LightningModule):
    """As in docs/recipes/lightning.md."""

    log = torch.compiler.disable(lightning.LightningModule.log)  # which Dynamo cannot trace

    def __init__(self, how: str) -> None:
        super().__init__()
        self.network: nn.Module = model().float()
        if how == "fused":
            self.network = fusion.fuse(self.network)
        elif how == "compiled":
            self.network.compile(backend=fusion.fusion_backend)
        elif how == "step":
            self.training_step = fusion.fuse(self.training_step)  # type: ignore[method-assign]  # as users do

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.cross_entropy(self.network(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)


def trained(how: str, **settings: Any) -> tuple[Classifier, lightning.Trainer, list[Tensor]]:
    """The module, its trainer, and metrics and parameters after two epochs."""
    draws = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(ROWS, WIDTH, generator=draws), torch.randint(CLASSES, (ROWS,), generator=draws)
    )
    batches = torch.utils.data.DataLoader(data, batch_size=6)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet, **settings)
    module = Classifier(how)
    trainer.fit(module, batches, batches)
    metrics = [trainer.callback_metrics[name] for name in ("loss", "validation")]
    return module, trainer, [*metrics, *(parameter.detach() for parameter in module.network.parameters())]


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("how", ["fused", "compiled", "step"])
def test_training(how: str, settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    module, _, ours = trained(how, **settings)
    close = {"rtol": 3e-2, "atol": 1e-2} if "precision" in settings else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, trained("eager", **settings)[2], **close)
    backend = backend_of(vars(module)["training_step"] if how == "step" else module.network)
    assert backend is not None
    assert {report.label for report in backend.reports} >= {"forward", "backward"}
    assert all(report.kernels and not report.externs for report in backend.reports)


def test_checkpoints_have_the_names_of_the_network(tmp_path: Path) -> None:
    module, trainer, _ = trained("fused")
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    for how in ("eager", "fused"):
        loaded = Classifier.load_from_checkpoint(tmp_path / "saved.ckpt", how=how, weights_only=False)
        torch.testing.assert_close(loaded.state_dict(), module.state_dict(), rtol=0, atol=0)
