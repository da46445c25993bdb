"""What an artifact was not saved for is refused at the call; sizes that vary satisfy stated inequalities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor, nn
from torch.export import Dim, export

import fusion
from tests.fusion.artifact.saving import assert_like_eager, saved


def doubled(x: Tensor, times: float = 2.0) -> Tensor:
    return x * times


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(4, 3),), r"x has shape \[4, 3\], and this was saved for \[3, 4\]"),
        ((torch.ones(12),), r"x has shape \[12\]"),
        ((torch.ones(3, 4, dtype=torch.float64),), "x is torch.float64 on cpu, and this was saved for torch.float32"),
        ((torch.ones(3, 4, device="meta"),), "x is torch.float32 on meta"),
        ((torch.ones(3, 4).to_sparse(),), "sparse"),
        ((3,), "x is a int, and this was saved for a tensor"),
        ((torch.ones(3, 4, requires_grad=True),), "requires a gradient"),
        ((torch.ones(3, 4), 2.0), "a tuple of 2, and this was saved for a tuple of 1"),
        (([torch.ones(3, 4)],), "x is a list"),
        ((), "a tuple of 0, and this was saved for a tuple of 1"),
    ],
)
def test_other_arguments_are_refused(args: tuple[object, ...], message: str, tmp_path: Path) -> None:
    artifact = saved(doubled, tmp_path, torch.ones(3, 4))
    with pytest.raises(fusion.ArtifactError, match=message):
        artifact(*args)
    assert torch.equal(artifact(torch.ones(3, 4)), torch.full((3, 4), 2.0))


def test_other_constants_are_refused(tmp_path: Path) -> None:
    artifact = saved(doubled, tmp_path, torch.ones(3), 3.0)
    assert artifact(torch.ones(3), 3.0).tolist() == [3, 3, 3]
    for other in (4.0, 3, True, None):
        with pytest.raises(fusion.ArtifactError, match=f"times is {other!r}, and this was saved for 3.0"):
            artifact(torch.ones(3), other)


def test_a_tensor_in_another_layout_is_copied(tmp_path: Path) -> None:
    artifact = saved(doubled, tmp_path, torch.ones(3, 4))
    turned = torch.randn(4, 3).t()
    assert torch.equal(artifact(turned), turned * 2)
    imaginary = torch.randn(3, 4, dtype=torch.cfloat).conj().imag
    assert imaginary.is_neg() and torch.equal(artifact(imaginary), imaginary * 2)


def test_a_tensor_that_is_changed_is_not_copied(tmp_path: Path) -> None:
    artifact = saved(lambda x: x.add_(1), tmp_path, torch.ones(3, 4))
    with pytest.raises(fusion.ArtifactError, match=r"x has strides \[1, 3\], and this was saved for \[4, 1\]"):
        artifact(torch.randn(4, 3).t())


def test_a_tensor_that_is_changed_shares_no_memory(tmp_path: Path) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    artifact, both = saved(program, tmp_path, torch.ones(3), torch.ones(3)), torch.ones(6)
    assert artifact(both[:3], both[3:]).tolist() == [2, 2, 2]
    with pytest.raises(fusion.ArtifactError, match="shares memory"):
        artifact(both[:3], both[2:5])
    assert both.tolist() == [2, 2, 2, 1, 1, 1]


def test_fake_tensors_and_vmap_are_refused(tmp_path: Path) -> None:
    artifact = saved(doubled, tmp_path, torch.ones(3))
    with pytest.raises(fusion.Unsupported, match="vmap"):
        torch.vmap(artifact)(torch.ones(2, 3))
    with torch._subclasses.FakeTensorMode(), pytest.raises(fusion.Unsupported, match="fake tensors"):
        artifact(torch.ones(3))


# Sizes that vary ------------------------------------------------------------------------------------------------------

ROWS = Dim("rows", min=2, max=64)
DYNAMIC: dict[str, tuple[Callable[..., object], tuple[object, ...], object, list[tuple[object, ...]]]] = {
    "rows": (
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)),
        (torch.randn(4, 8),),
        ({0: ROWS},),
        [(torch.randn(n, 8),) for n in (2, 7, 64)],
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (torch.randn(2, 2, 32, 16),) * 3,
        ({2: ROWS},) * 3,
        [(torch.randn(2, 2, n, 16),) * 3 for n in (2, 33, 64)],
    ),
    "several": (
        lambda x, y: torch.cat([x, y], 0).softmax(0).view(-1),
        (torch.randn(4, 6), torch.randn(5, 6)),
        ({0: Dim.AUTO}, {0: Dim.AUTO}),
        [(torch.randn(7, 6), torch.randn(3, 6))],
    ),
    "twice a size": (
        lambda x: x.view(2, -1).sum(1),
        (torch.randn(8),),
        ({0: 2 * Dim("half", min=2)},),
        [(torch.randn(12),)],
    ),
    "strides of their own": (
        lambda x: x.softmax(-1) + 1,
        (torch.randn(4, 9)[:, :5],),
        ({0: Dim.AUTO, 1: Dim.AUTO},),
        [(torch.randn(6, 20)[:, 3:13],)],
    ),
    "views of an argument": (
        lambda x: (x.t(), x[1:], x.shape[0] * 2),
        (torch.randn(4, 3),),
        ({0: Dim.AUTO},),
        [(torch.randn(9, 3),)],
    ),
    "a number": (lambda x, n: x * n, (torch.randn(4), 3), ({0: Dim.AUTO}, Dim.DYNAMIC), [(torch.randn(5), 9)]),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_sizes_vary(name: str, tmp_path: Path) -> None:
    program, args, shapes, others = DYNAMIC[name]
    artifact = saved(program, tmp_path, *args, dynamic_shapes=shapes)
    for each in [args, *others]:
        assert_like_eager(program, artifact, each)


def test_inequalities_are_stated_and_checked(tmp_path: Path) -> None:
    artifact = saved(doubled, tmp_path, torch.ones(4, 3), dynamic_shapes={"x": {0: ROWS}})
    (size,) = artifact.manifest["arguments"]["sizes"]
    assert artifact.inequalities == (f"2 <= {size['name']}", f"{size['name']} <= 64")
    for rows in (1, 65):
        with pytest.raises(fusion.ArtifactError, match=rf"{size['name']} = {rows}\n  hint: .* is x.size\(0\)"):
            artifact(torch.ones(rows, 3))
    with pytest.raises(fusion.ArtifactError, match=r"x has shape \[4, 5\], and this was saved for \[s\d+, 3\]"):
        artifact(torch.ones(4, 5))


def test_sizes_that_were_equal_have_to_be_equal(tmp_path: Path) -> None:
    artifact = saved(lambda x, y: x + y, tmp_path, torch.ones(4), torch.ones(4), dynamic_shapes=({0: ROWS}, {0: ROWS}))
    assert artifact(torch.ones(5), torch.ones(5)).tolist() == [2] * 5
    with pytest.raises(fusion.ArtifactError, match="has shape"):
        artifact(torch.ones(5), torch.ones(6))


def test_what_the_program_asked_about_sizes_is_an_inequality(tmp_path: Path) -> None:
    def program(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] > 10 else x - 1

    artifact = saved(program, tmp_path, torch.ones(20), dynamic_shapes=({0: Dim.AUTO},))
    assert artifact(torch.ones(11)).tolist() == [2] * 11
    with pytest.raises(fusion.ArtifactError, match="this was saved for sizes with"):
        artifact(torch.ones(10))


def test_what_is_asserted_about_data_is_checked(tmp_path: Path) -> None:
    def program(x: Tensor, count: Tensor) -> Tensor:
        number = count.item()
        torch._check(number >= 2)
        torch._check(number <= x.shape[0])
        return x[:number] * 2

    shapes = ({0: Dim.AUTO}, None)
    artifact = saved(program, tmp_path, torch.ones(9), torch.tensor(4), dynamic_shapes=shapes)
    assert artifact(torch.ones(12), torch.tensor(11)).tolist() == [2] * 11
    for wrong in (1, 13):
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            artifact(torch.ones(12), torch.tensor(wrong))


@pytest.mark.parametrize("decomposed", [False, True])
def test_an_exported_program_is_saved(decomposed: bool, tmp_path: Path) -> None:
    shapes = None if decomposed else ({0: ROWS},)
    exported = export(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (torch.randn(3, 4),), dynamic_shapes=shapes)
    exported = exported.run_decompositions() if decomposed else exported
    artifact, eager = saved(exported, tmp_path), exported.module()
    for rows in (3, 3 if decomposed else 50):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(artifact(x), eager(x).detach())
    torch.testing.assert_close(artifact.state_dict()["1.running_var"], eager.state_dict()["1.running_var"])
