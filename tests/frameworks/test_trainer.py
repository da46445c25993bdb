"""The Trainer of transformers: a fused model, and one that its accelerator compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion.backend import backend_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CONFIG = GPT2Config(
    n_layer=2,
    n_embd=32,
    n_head=2,
    vocab_size=64,
    n_positions=32,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


class FusionPlugin(TorchDynamoPlugin):
    """As in docs/recipes/trainer.md."""

    def to_kwargs(self) -> dict[str, Any]:
        return {**super().to_kwargs(), "backend": fusion.fusion_backend}


def trained(how: str, folder: Path, **settings: Any) -> tuple[Trainer, list[Tensor]]:
    """The trainer, and losses and parameters."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 64, (12, 16))]
    arguments = TrainingArguments(
        str(folder / how),
        max_steps=4,
        per_device_train_batch_size=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        save_strategy="no",
        **settings,
    )
    trainer = Trainer(fusion.fuse(model) if how == "fused" else model, arguments, train_dataset=rows)
    if how == "plugin":
        trainer.accelerator.state.dynamo_plugin = FusionPlugin(backend="eager")
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4
    return trainer, [torch.tensor(losses), *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("how", ["fused", "plugin"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
)
def test_training(how: str, settings: dict[str, Any], tmp_path: Path) -> None:
    torch._dynamo.reset()
    close = {"rtol": 2e-2, "atol": 5e-3} if "bf16" in settings else {"rtol": 1e-4, "atol": 1e-5}
    trainer, ours = trained(how, tmp_path, **settings)
    torch.testing.assert_close(ours, trained("eager", tmp_path, **settings)[1], **close)
    backend = backend_of(trainer.model_wrapped)
    assert backend is not None
    assert {report.label for report in backend.reports} == {"forward", "backward"}
    assert all(report.kernels for report in backend.reports)


def test_a_model_that_the_plugin_compiles_is_saved_without_a_prefix(tmp_path: Path) -> None:
    trainer, _ = trained("plugin", tmp_path)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = GPT2LMHeadModel.from_pretrained(str(tmp_path / "saved"))
    torch.testing.assert_close(loaded.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
    assert trainer.evaluate([{"input_ids": torch.ones(16, dtype=torch.int64), "labels": torch.ones(16).long()}])
