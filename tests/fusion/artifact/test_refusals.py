"""Programs that are not saved are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusion
from tests.fusion.artifact.saving import assert_like_eager, saved


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def asks(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


class Shared(nn.Module):
    """Changes a buffer that is a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[1:])

    def forward(self, x: Tensor) -> Tensor:
        self.part.add_(1)
        return x + self.whole


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (branches, r"branches or loops on data"),
        (asks, r"PyTorch does not export the program as one graph"),
        (lambda x: x.t_(), r"changes the shape or the memory of its inputs"),
        (lambda x: torch.topk(x, 2), r"results of type topk are not saved"),
        (lambda x: torch.autograd.grad(x.sum(), x), r"PyTorch does not export"),
        (lambda x: x[1:].copy_(x[:-1]), r"partly overlaps one that is read"),
        (lambda x: x[:1].expand(4, 4).add_(1), r"elements that share memory"),
        (Shared(), r"inputs share memory, and are changed in place"),
        (fusion.fuse(torch.relu, options={"target": "reference"}), r"the reference target .* has no binaries"),
    ],
    ids=["cond", "if", "resized", "named tuple", "gradient", "overlap", "expanded", "shared buffers", "target"],
)
def test_a_program_that_is_not_saved_is_refused(program: Callable[..., object], message: str, tmp_path: Path) -> None:
    with pytest.raises(fusion.Unsupported, match=message):
        fusion.save(program, tmp_path / "program.fusion", inputs=(torch.ones(4, 4),))
    assert not [*tmp_path.iterdir()]


def test_shared_buffers_of_a_program_that_was_read_from_a_file(tmp_path: Path) -> None:
    """Its traced values do not share memory, its buffers do."""
    module = Shared()
    module.part = module.whole
    torch.export.save(torch.export.export(module, (torch.ones(4),)), tmp_path / "program.pt2")
    exported = torch.export.load(tmp_path / "program.pt2")
    with pytest.raises(fusion.Unsupported, match="is changed in place, and shares memory with another tensor"):
        fusion.save(exported, tmp_path / "program.fusion")


@pytest.mark.parametrize(
    ("program", "inputs", "message"),
    [(3, (), "got int"), (torch.relu, torch.ones(3), "inputs must be a tuple or a list of arguments, got Tensor")],
)
def test_arguments_of_the_wrong_type_are_refused(program: Any, inputs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message):
        fusion.save(program, tmp_path / "program.fusion", inputs=inputs)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fusion.save(torch.relu, tmp_path / "none" / "program.fusion", inputs=(torch.ones(3),))


# Types of results that a library registers ----------------------------------------------------------------------------


class Output(dict[str, Tensor]):
    """A result as a library defines it."""


NAME = "tests.fusion.artifact.Output"


@pytest.fixture
def registered() -> Iterator[None]:
    """Registers the type."""
    pytree.register_pytree_node(
        Output,
        lambda value: ([*value.values()], [*value]),
        lambda values, keys: Output(zip(keys, values, strict=True)),
        serialized_type_name=NAME,
    )
    yield
    if Output in pytree.SUPPORTED_NODES:
        pytree._deregister_pytree_node(Output)


@pytest.mark.usefixtures("registered")
def test_a_registered_type_is_returned_where_it_is_registered(tmp_path: Path) -> None:
    def program(x: Tensor) -> Output:
        return Output(first=x + 1, second=x * 2)

    artifact = saved(program, tmp_path, torch.ones(3))
    assert_like_eager(program, artifact, (torch.randn(3),))
    pytree._deregister_pytree_node(Output)
    with pytest.raises(fusion.ArtifactError, match=r"(?s)of type tests\.fusion\.artifact\.Output.*import tests"):
        artifact(torch.ones(3))


# GPUs -----------------------------------------------------------------------------------------------------------------


def test_a_gpu_has_one_architecture(tmp_path: Path) -> None:
    with pytest.raises(fusion.Unsupported, match="for one architecture"):
        saved(torch.relu, tmp_path, torch.ones(3), device="cuda", arch=("sm_80", "sm_90"))
    with pytest.raises(fusion.Unsupported, match="programs on xpu are not saved"):
        saved(torch.relu, tmp_path, torch.ones(3), device="xpu")


def test_what_cannot_be_traced_again_is_refused_with_the_line_of_the_program(tmp_path: Path) -> None:
    fails: list[bool] = []

    @torch.library.custom_op("fusion_tests::traced_once", mutates_args=())
    def traced_once(x: Tensor) -> Tensor:
        return x.clone()

    @traced_once.register_fake
    def shape_of(x: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("expected to contain only concrete integers")
        return torch.empty_like(x)

    exported = torch.export.export(_Calling(traced_once), (torch.ones(3),))
    fails.append(True)
    with pytest.raises(fusion.Unsupported, match="only concrete integers") as refused:
        fusion.save(exported, tmp_path / "program.fusion")
    assert "test_refusals.py" in str(refused.value) and "fusion_tests.traced_once" in str(refused.value)


class _Calling(nn.Module):
    """Calls an operation."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x) + 1
