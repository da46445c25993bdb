"""What programs do around a compiled module: copies of it, checkpoints of its state, workers, blocks compiled alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fusion
from fusion.backend import backend_of
from tests.frameworks.training import WIDTH, Model, Training, assert_trained_alike, model

STRICT: dict[str, object] = {"strict": True}

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "fuse": lambda module: fusion.fuse(module, options=STRICT),
    "torch.compile": lambda module: torch.compile(module, backend=fusion.fusion_backend, options=STRICT),
    "compile": lambda module: module.compile(backend=fusion.fusion_backend, options=STRICT) or module,
}


def kernels_of(module: nn.Module) -> list[str]:
    backend = backend_of(module)
    assert backend is not None
    return [kernel.name for report in backend.reports for kernel in report.kernels]


# Equal blocks ---------------------------------------------------------------------------------------------------------


def per_block(whole: Model, way: str) -> Model:
    for number, block in enumerate(whole.blocks):
        whole.blocks[number] = WAYS[way](block)
    return whole


@pytest.mark.parametrize("way", WAYS)
def test_equal_blocks_are_compiled_once(way: str) -> None:
    """Twelve blocks: one graph of three kernels in inference; in training one more for an input without gradients."""
    torch._dynamo.reset()
    counters.clear()
    whole, eager = per_block(model(blocks=12), way), model(blocks=12)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(whole(x), eager(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert_trained_alike(whole, eager, Training(steps=2))
    assert counters["stats"]["unique_graphs"] == 3


def test_marked_regions_share_kernels() -> None:
    """A region marked with `nested_compile_region` is inlined, and its kernels are built once."""

    @torch.compiler.nested_compile_region
    def applied(block: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = block(x)
        return result

    class Marked(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = applied(block, x)
            result: Tensor = self.head(x)
            return result

    torch.manual_seed(0)
    marked = Marked(blocks=4).double()
    fused = fusion.fuse(marked, options=STRICT)
    assert_trained_alike(fused, model(blocks=4), Training(steps=2))
    forward, backward = fusion.report(fused).graphs
    assert len(forward.kernels) == 3 * 4 + 1 and not forward.externs and not backward.externs
    assert len({kernel.source for kernel in forward.kernels}) <= 5


# Copies and state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_an_average_of_a_compiled_model(way: str) -> None:
    """`AveragedModel` copies the module deeply; the copy has parameters of its own, and runs on kernels."""

    def averaged(module: nn.Module) -> tuple[Tensor, list[Tensor]]:
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for seed in range(3):
            Training(steps=1, seed=seed).run(module)
            average.update_parameters(module)
        x = torch.ones(6, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            return average(x), [parameter.detach() for parameter in average.parameters()]

    module = WAYS[way](model())
    torch.testing.assert_close(averaged(module), averaged(model()), rtol=1e-8, atol=1e-9)
    assert kernels_of(module)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        x = torch.ones(6, WIDTH, dtype=torch.float64)
        assert not copied(x).any() and module(x).any()


@pytest.mark.parametrize("saved", ["eager", *WAYS])
@pytest.mark.parametrize("loading", ["eager", *WAYS])
def test_states_of_compiled_and_plain_models(saved: str, loading: str, tmp_path: Path) -> None:
    """Only what `torch.compile` returns puts a prefix before names, which `fuse` and `Module.compile` do not."""
    one, other = (WAYS.get(way, lambda module: module)(model()) for way in (saved, loading))
    Training(steps=1).run(one)
    torch.save(one.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    assert {name.startswith("_orig_mod.") for name in state} == {saved == "torch.compile"}
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "_orig_mod.")
    getattr(other, "_orig_mod", other).load_state_dict(state)
    x = torch.ones(6, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(other(x), one(x))


# Checkpoints and workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Training(), Training(accumulated=3), Training(autocast=True)], ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_checkpointed_blocks(way: str, how: Training) -> None:
    module = WAYS[way](model(checkpointed=True))
    assert_trained_alike(module, model(checkpointed=True), how)
    assert kernels_of(module)


LONG = 1 << 17
"""Elements that several threads compute, where there are several."""


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows that a worker computes with the compiled function that the program has used before."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Tensor:
        return self.function(torch.full((LONG,), number / LONG))


@pytest.mark.parametrize("context", ["fork"])
def test_workers_that_are_forked_after_kernels_ran(context: str) -> None:
    """A worker has its parent's kernels, but none of its threads."""
    function = fusion.fuse(lambda x: (x * 2 + 1).tanh().relu(), options=STRICT)
    torch.testing.assert_close(function(torch.ones(LONG)), torch.full((LONG,), 3.0).tanh())
    expected = [function(torch.full((LONG,), number / LONG)) for number in range(6)]
    loader = torch.utils.data.DataLoader(
        Rows(function), batch_size=None, num_workers=2, multiprocessing_context=context, timeout=120
    )
    torch.testing.assert_close(list(loader), expected)
    assert fusion.report(function).kernels
