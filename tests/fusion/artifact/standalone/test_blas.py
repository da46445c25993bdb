"""Libraries that leave products to a BLAS: OpenBLAS of the system, or of NumPy's wheel."""

from __future__ import annotations

from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fusion
from fusion.artifact.standalone import export
from fusion.codegen.c import device
from fusion.codegen.c.standalone.blas import blas_of
from fusion.codegen.standalone import BlasProduct
from tests.fusion.artifact.standalone.calling import Library

OWN = sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*.so"))
BLAS = "openblas" if find_library("openblas") else str(OWN[0]) if OWN else ""
needs_blas = pytest.mark.skipif(not BLAS, reason="needs OpenBLAS, as NumPy's wheels have it")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[BlasProduct]:
    """The products of the programs that are exported."""
    found: list[BlasProduct] = []
    library = export.library

    def seen(program, *others):  # type: ignore[no-untyped-def]
        found.extend(step for step in program.steps if isinstance(step, BlasProduct))
        return library(program, *others)

    monkeypatch.setattr(export, "library", seen)
    return found


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.softmax(x @ w.T, -1)
    return scores, scores.T @ x, torch.relu(x.T) @ (scores @ w)


def batched(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(x, y.transpose(1, 2)), torch.baddbmm(y[:1], x, x[:1].expand(x.shape[0], -1, -1))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


CASES: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "layers": (nn.Sequential(nn.Linear(192, 320), nn.GELU(), nn.Linear(320, 192)).eval(), (drawn(96, 192),)),
    "doubles": (nn.Linear(160, 96, dtype=torch.float64).eval(), (drawn(128, 160, dtype=torch.float64),)),
    "transposed": (mixed, (drawn(96, 128), drawn(160, 128))),
    "several": (batched, (drawn(5, 96, 96), drawn(5, 96, 96))),
    "gaps": (lambda x, y: x[:, ::2] @ y[::3], (drawn(96, 256), drawn(384, 128))),
    "spread": (lambda x, y: x.expand(128, 192) @ y, (drawn(1, 192), drawn(192, 96))),
}


@needs_blas
@pytest.mark.parametrize("case", CASES)
def test_products_are_calls_of_blas(case: str, products: list[BlasProduct], tmp_path: Path) -> None:
    program, given = CASES[case]
    fusion.export_library(program, tmp_path / "libmodel.so", inputs=given, blas=BLAS)
    assert products
    with torch.no_grad():
        expected = program(*given)
    torch.testing.assert_close(Library(tmp_path / "libmodel.so")(*given), expected, rtol=1e-4, atol=1e-3)


@needs_blas
def test_sizes_vary(products: list[BlasProduct], tmp_path: Path) -> None:
    program = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 64)).eval()
    rows = ({0: Dim("rows", max=1024)},)
    path = tmp_path / "libmodel.so"
    fusion.export_library(program, path, inputs=(drawn(128, 192),), dynamic_shapes=rows, blas=BLAS)
    assert products
    for count in (1, 2, 77, 512):
        x = drawn(count, 192)
        torch.testing.assert_close(Library(path)(x), program(x).detach(), rtol=1e-4, atol=1e-4)


@needs_blas
def test_products_of_other_dtypes_are_refused_with_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "assumed", lambda: device.EPYC)  # whose library multiplies 16-bit floats fast
    program = nn.Linear(512, 512).bfloat16().eval()
    with pytest.raises(fusion.Unsupported, match=r"a library cannot call: aten\.addmm\.default"):
        fusion.export_library(program, tmp_path / "libmodel.so", inputs=(drawn(512, 512).bfloat16(),), blas=BLAS)


def test_a_blas_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fusion.Unsupported, match="there is no BLAS called 'nowhere'"):
        fusion.export_library(torch.relu, tmp_path / "lib.so", inputs=(drawn(3),), blas="nowhere")
    (tmp_path / "other.so").write_bytes(b"nothing")
    with pytest.raises(fusion.Unsupported, match=r"other\.so cannot be loaded"):
        blas_of(str(tmp_path / "other.so"))
    assert not (tmp_path / "lib.so").exists()


def test_a_library_without_products_is_refused() -> None:
    name = "m"
    with pytest.raises(fusion.Unsupported, match="has no cblas_sgemm"):
        blas_of(name)
