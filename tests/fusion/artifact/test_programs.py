"""Programs that are saved and loaded compute what they compute in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch import Tensor, nn
from torch.export import Dim

import fusion
from tests.fusion.artifact.saving import assert_like_eager, saved


class Cache(nn.Module):
    """Writes a row of a buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(10, 4), persistent=False)

    def forward(self, row: Tensor, place: Tensor) -> Tensor:
        self.rows.index_copy_(0, place, row)
        return self.rows.sum(0)


class Strided(nn.Module):
    """Has weights that are transposed, spread and empty, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6).t())
        self.register_buffer("spread", torch.arange(12.0)[::2])
        self.none = nn.Parameter(torch.empty(0, 3))
        self.plain = torch.randn(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + self.plain).sum() + self.spread.sum() + self.none.sum()


class Tied(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.embed(x)))


class Lower(nn.Module):
    """Computes in bfloat16, in parts without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            return self.linear(x) + 1


def in_place(x: Tensor, y: Tensor) -> Tensor:
    x[1:].mul_(y)
    return x.sum()


PROGRAMS: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "softmax of a product": (lambda x, y: torch.softmax(x @ y, -1) + 1, (torch.randn(8, 16), torch.randn(16, 9))),
    "a fused function": (fusion.fuse(lambda x: torch.relu(x) * 2), (torch.randn(8, 16),)),
    "a fused module": (fusion.fuse(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))), (torch.randn(8, 8),)),
    "strict numerics": (fusion.fuse(nn.LayerNorm(8), options={"numerics": "strict"}), (torch.randn(3, 8),)),
    "images": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).eval(),
        (torch.randn(2, 3, 8, 8),),
    ),
    "attention": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), (torch.randn(2, 5, 16),)),
    "recurrence": (nn.LSTM(4, 8, batch_first=True).eval(), (torch.randn(2, 5, 4),)),
    "tied weights": (Tied().eval(), (torch.randint(0, 12, (3, 4)),)),
    "weights in other layouts": (Strided(), (torch.randn(3, 6),)),
    "bfloat16": (Lower(), (torch.randn(4, 8),)),
    "integers": (
        lambda x: (x.float() * 0.5).round().to(torch.int8),
        (torch.randint(0, 100, (8, 8), dtype=torch.uint8),),
    ),
    "complex numbers": (lambda x: torch.fft.rfft(x).abs(), (torch.randn(16),)),
    "tensors written in the program": (
        lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3),
        (torch.randn(3),),
    ),
    "sizes that depend on data": (lambda x: x[x > 0] * 2, (torch.randn(10),)),
    "an argument that is changed": (in_place, (torch.randn(4, 4), torch.randn(4))),
    "nothing to do": (lambda x: x, (torch.randn(3),)),
    "a mask that is written to": (
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(12, 12).fill_diagonal_(1)),
        (torch.randn(2, 12, 12),),
    ),
    "no elements": (lambda x: x.sum(0), (torch.randn(0, 4),)),
    "a loss in chunks": (
        fusion.fuse(lambda x, w: F.cross_entropy(x @ w, torch.zeros(64).long()), options={"workspace": 1024}),
        (torch.randn(64, 8), torch.randn(8, 100)),
    ),
    "nested arguments and results": (
        lambda pair, flag: {
            "sum": pair["a"] + pair["b"][0],
            "rest": [pair["a"] * 2 if flag else None, None, 1.5, "text"],
        },
        ({"a": torch.randn(3), "b": (torch.randn(3),)}, True),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_what_eager_computes(name: str, tmp_path: Path) -> None:
    program, args = PROGRAMS[name]
    artifact = saved(program, tmp_path, *args)
    for _ in range(2):
        assert_like_eager(program, artifact, args)


@pytest.mark.parametrize("module", [nn.BatchNorm1d(4), Cache()], ids=["statistics", "a cache"])
def test_buffers_are_changed_by_each_call(module: nn.Module, tmp_path: Path) -> None:
    args = (torch.randn(6, 4),) if isinstance(module, nn.BatchNorm1d) else (torch.randn(1, 4), torch.tensor([3]))
    artifact, eager = saved(module, tmp_path, *args), copy.deepcopy(module)
    for k in range(3):
        moved = args if k == 0 else (args[0] * k, *args[1:])
        torch.testing.assert_close(artifact(*moved), eager(*moved).detach())
    torch.testing.assert_close(artifact.state_dict(), {n: v.detach() for n, v in eager.state_dict().items()})


def test_results_that_are_arguments_or_views_of_them(tmp_path: Path) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        y.add_(1)
        return x.t(), x[1:, 1:], x, y, y.view(-1)[2:]

    artifact = saved(program, tmp_path, torch.randn(4, 5), torch.randn(2, 3))
    x, y = torch.randn(4, 5), torch.zeros(2, 3)
    turned, inner, same, changed, flat = artifact(x, y)
    assert same is x and changed is y
    x.zero_()
    y[0, 2] = 7
    assert not turned.any() and not inner.any() and flat.tolist() == [7, 1, 1, 1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_a_changed_argument_has_its_layout(dynamic: bool, tmp_path: Path) -> None:
    """The functional operation has a result of another layout than the argument."""

    def program(x: Tensor, index: Tensor, y: Tensor) -> Tensor:
        x.index_add_(0, index, y)
        return x.t()

    args = torch.randn(5, 4).t(), torch.tensor([1, 3]), torch.randn(2, 5)
    shapes = ({0: Dim.AUTO}, None, None) if dynamic else None
    artifact = saved(program, tmp_path, *args, dynamic_shapes=shapes)
    assert_like_eager(program, artifact, args)
    x = torch.randn(5, 4).t()
    view = artifact(x, *args[1:])
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and torch.equal(view, x.t())


def test_results_share_memory_as_in_eager(tmp_path: Path) -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        doubled = x * 2
        return doubled, doubled, doubled[1:]

    first, second, part = saved(program, tmp_path, torch.randn(4, 4))(torch.ones(4, 4))
    assert first is second
    first.zero_()
    assert not part.any()


def test_random_numbers_follow_the_generator(tmp_path: Path) -> None:
    artifact = saved(nn.Dropout(0.5), tmp_path, torch.ones(1000))
    torch.manual_seed(1)
    first, second = artifact(torch.ones(1000)), artifact(torch.ones(1000))
    torch.manual_seed(1)
    assert torch.equal(artifact(torch.ones(1000)), first) and not torch.equal(first, second)
    assert 400 < (first == 0).sum() < 600 and first.max() == 2


def test_an_index_out_of_range_is_eagers_error_with_the_programs_line(tmp_path: Path) -> None:
    artifact = saved(nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8)), tmp_path, torch.randint(0, 10, (3, 4)))
    with pytest.raises(IndexError, match=r"(?s)index out of range in self.*\.py:\d+"):
        artifact(torch.full((3, 4), 11))
    assert artifact(torch.zeros(3, 4, dtype=torch.int64)).shape == (3, 4, 8)


def test_a_failed_check_in_a_function_names_its_line(tmp_path: Path) -> None:
    def program(x: Tensor, at: Tensor, *, scale: float = 2.0) -> Tensor:
        return x[at] * scale

    artifact = saved(program, tmp_path, torch.randn(9, 3), torch.tensor([1, 8]))
    line = program.__code__.co_firstlineno + 1
    with pytest.raises(IndexError, match=rf"(?s)index 9 .*test_programs\.py:{line}"):
        artifact(torch.randn(9, 3), torch.tensor([1, 9]))
    assert_like_eager(program, artifact, (torch.randn(9, 3), torch.tensor([2, -1])))


def test_arguments_may_be_passed_by_name(tmp_path: Path) -> None:
    def program(x: Tensor, y: Tensor, *, scale: float) -> Tensor:
        return (x - y) * scale

    artifact = saved(program, tmp_path, torch.ones(3), torch.ones(3), kwargs={"scale": 2.0})
    assert artifact(y=torch.ones(3), scale=2.0, x=torch.full((3,), 4.0)).tolist() == [6, 6, 6]


def test_equal_layers_share_kernels(tmp_path: Path) -> None:
    def layers(count: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(count)))

    few, many = (saved(layers(count), tmp_path, torch.randn(3, 16)).manifest["kernels"] for count in (3, 6))
    assert [kernel["name"] for kernel in few] == [kernel["name"] for kernel in many]


def test_autocast_around_a_call_changes_nothing(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    artifact = saved(model, tmp_path, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = artifact(x)
    torch.testing.assert_close(result, model(x).detach())


def test_autocast_around_save_is_saved(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        artifact, expected = saved(model, tmp_path, x), model(x).detach()
    assert expected.dtype is torch.bfloat16
    torch.testing.assert_close(artifact(x), expected, rtol=0, atol=0.02)


def test_an_artifact_is_called_from_a_compiled_program(tmp_path: Path) -> None:
    artifact = saved(lambda x: torch.relu(x) + 1, tmp_path, torch.randn(5))
    compiled = torch.compile(lambda x: artifact(x * 2) * 3, backend="eager")
    assert compiled(torch.tensor([1.0, -1, 2, 0, 0])).tolist() == [9, 3, 15, 3, 3]


# Sizes that vary ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_images_are_resized_to_a_size_that_varies(mode: str, tmp_path: Path) -> None:
    class Resized(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.interpolate(x, size=y.shape[2:], mode=mode) + y

    sizes = {"x": None, "y": {2: Dim("height", max=64), 3: Dim("width", max=64)}}
    x = torch.randn(2, 3, 8, 8)
    artifact = saved(Resized(), tmp_path, x, torch.randn(2, 3, 16, 12), dynamic_shapes=sizes)
    for shape in ((16, 12), (20, 9), (5, 31)):
        assert_like_eager(Resized(), artifact, (x, torch.randn(2, 3, *shape)))


def images() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    return nn.Sequential(*layers, nn.Softmax(-1)).eval()


FROM_ONE: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
    "images": (images(), (3, 9, 9)),
    "rows": (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8), nn.GELU()), (16,)),
    "sums over the batch": (lambda x: ((x - x.mean(0)).cumsum(0), x.sum(0), x.amax(0)), (8,)),
    "differences": (lambda x: x[1:] - x[:-1], (8,)),
    "pairs": (lambda x: (x.unsqueeze(1) * x.unsqueeze(0)).sum(-1), (3,)),
    "one axis of two": (lambda x: x.reshape(-1, 4).softmax(0), (8,)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (2, 6, 16)),
    "products": (lambda x: x @ x.transpose(1, 2), (3, 4)),
    "a view": (lambda x: (x.view(-1), x * 2), (4,)),
}


@pytest.mark.parametrize("case", FROM_ONE)
def test_one_file_serves_a_batch_of_one_and_others(case: str, tmp_path: Path) -> None:
    program, shape = FROM_ONE[case]
    batch = Dim("batch", min=1, max=128)
    artifact = saved(program, tmp_path, torch.randn(6, *shape), dynamic_shapes=({0: batch},))
    assert any(text.startswith("1 <= ") for text in artifact.inequalities)
    for rows in (1, 2, 7, 64):
        assert_like_eager(program, artifact, (torch.randn(rows, *shape),))


def test_several_sizes_may_be_one(tmp_path: Path) -> None:
    sizes = ({0: Dim("batch", max=16), 1: Dim("length", max=64)},)
    program = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 9)).eval()
    artifact = saved(program, tmp_path, torch.randint(9, (2, 5)), dynamic_shapes=sizes)
    for shape in ((1, 1), (1, 7), (3, 1), (4, 6)):
        assert_like_eager(program, artifact, (torch.randint(9, shape),))
    with pytest.raises(fusion.ArtifactError, match="1 <= "):
        artifact(torch.randint(9, (0, 5)))


def test_a_program_that_has_to_know_whether_a_size_is_one_says_so(tmp_path: Path) -> None:
    def asks(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x.cumsum(0)

    batch = Dim("batch", max=128)
    artifact = saved(asks, tmp_path, torch.randn(6, 3), dynamic_shapes=({0: batch},))
    assert_like_eager(asks, artifact, (torch.randn(2, 3),))
    with pytest.raises(fusion.ArtifactError, match=r"saved for sizes with 2 <= [^\n]*\n  hint: \w+ is x\.size\(0\)"):
        artifact(torch.randn(1, 3))
