"""Libraries that draw random numbers: from a generator of their own, which can be seeded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusion
from tests.fusion.artifact.standalone.calling import Library


def seeded(library: Library, seed: int) -> Library:
    library.library.fusion_seed.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    library.library.fusion_seed(library.model, seed)
    return library


def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.rand_like(x) + x, torch.randn(x.shape[0], 3) * 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("random") / "libnoisy.so"
    fusion.export_library(noisy, result, inputs=(torch.zeros(4000, 5),))
    return result


def test_numbers_have_their_distributions(path: Path) -> None:
    uniform, normal = Library(path)(torch.zeros(4000, 5))
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(normal.mean()) == pytest.approx(0, abs=0.1) and float(normal.std()) == pytest.approx(2, rel=0.05)
    assert not torch.equal(uniform[:, :3], normal)


def test_runs_draw_other_numbers_and_the_same_after_the_same_seed(path: Path) -> None:
    x, library = torch.zeros(4000, 5), Library(path)
    first, second = library(x), library(x)
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    again = Library(path)
    assert torch.equal(again(x)[0], first[0]) and torch.equal(again(x)[1], second[1])
    other, repeated = seeded(again, 7)(x), seeded(library, 7)(x)
    assert torch.equal(other[0], repeated[0]) and not torch.equal(other[0], first[0])
    distinct = {float(seeded(library, seed)(x)[0][0, 0]) for seed in (0, 1, 2, 1 << 40, (1 << 64) - 1)}
    assert len(distinct) == 5


def test_tokens_are_sampled(tmp_path: Path) -> None:
    class Sampled(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return torch.multinomial(torch.softmax(logits, -1), 1)

    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf]).expand(3000, 4).contiguous()
    fusion.export_library(Sampled(), tmp_path / "libsampled.so", inputs=(logits,))
    tokens = Library(tmp_path / "libsampled.so")(logits)
    shares = torch.bincount(tokens.flatten(), minlength=4) / 3000
    torch.testing.assert_close(shares, torch.softmax(logits[0], -1), atol=0.03, rtol=0.0)


def test_dropout_in_training_mode(tmp_path: Path) -> None:
    program = nn.Sequential(nn.Dropout(0.25)).train()
    x = torch.ones(200, 50)
    fusion.export_library(program, tmp_path / "libdropped.so", inputs=(x,))
    found = Library(tmp_path / "libdropped.so")(x)
    assert sorted(found.unique().tolist()) == pytest.approx([0.0, 4 / 3])
    assert float((found == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
