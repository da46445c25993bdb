"""PEFT: adapters in a fused model are trained, merged and saved as in eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusion
from tests.frameworks.training import Training, model

pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model


def adapted(dropout: float = 0.0) -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(model(), LoraConfig(r=3, target_modules=["up", "down"], lora_dropout=dropout)).double()


def only_trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("how", [Training(), Training(accumulated=2), Training(autocast=True)], ids=repr)
def test_adapters_are_trained_alike(how: Training) -> None:
    fused, eager = fusion.fuse(adapted(), options={"strict": True}), adapted()
    start = {name: each.clone() for name, each in fused.state_dict().items()}
    close = {"rtol": 3e-2, "atol": 3e-2} if how.autocast else {"rtol": 1e-8, "atol": 1e-9}
    torch.testing.assert_close(how.run(fused), how.run(eager), **close)
    assert only_trained(fused) and all("lora_" in name for name in only_trained(fused))
    for name, value in fused.state_dict().items():
        assert torch.equal(value, start[name]) != ("lora_" in name), name
    report = fusion.report(fused)
    assert {graph.label for graph in report.graphs} == {"forward", "backward"}
    assert all(graph.kernels and not graph.externs for graph in report.graphs)


def test_dropout_of_adapters_is_drawn_anew_and_by_the_seed() -> None:
    fused, x = fusion.fuse(adapted(0.5).train(), options={"strict": True}), torch.randn(6, 16).double()
    for parameter in only_trained(fused).values():
        nn.init.normal_(parameter)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(fused(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert fusion.report(fused).kernels


def test_adapters_are_saved_and_merged(tmp_path: Path) -> None:
    fused, x = fusion.fuse(adapted(), options={"strict": True}), torch.randn(6, 16).double()
    Training().run(fused)
    fused.eval()
    with torch.no_grad():
        expected = fused(x)
        fused.save_pretrained(str(tmp_path))
        loaded = PeftModel.from_pretrained(model(), str(tmp_path)).double().eval()
        torch.testing.assert_close(loaded(x), expected)
        merged = fusion.fuse(loaded.merge_and_unload(), options={"strict": True})
        torch.testing.assert_close(merged(x), expected)
        assert fusion.report(merged).kernels and "lora" not in str([*merged.state_dict()])


def test_an_adapter_that_is_switched_off_is_compiled_anew() -> None:
    fused, x = fusion.fuse(adapted().eval(), options={"strict": True}), torch.randn(6, 16).double()
    for parameter in only_trained(fused).values():
        nn.init.normal_(parameter)
    with torch.no_grad():
        with_adapter = fused(x)
        with fused.disable_adapter():
            torch.testing.assert_close(fused(x), model()(x))
        assert not torch.allclose(with_adapter, model()(x))
        torch.testing.assert_close(fused(x), with_adapter)
