"""Weights: the safetensors format, files beside an artifact, and other values without compiling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fusion
from fusion.artifact.weights import bytes_of, pieces, tensors_in
from tests.fusion.artifact.saving import assert_like_eager, saved

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn),
)


def file_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(pieces(tensors))), dtype=torch.uint8)


def drawn() -> dict[str, torch.Tensor]:
    tensors = {str(dtype): torch.randn(3, 5).to(dtype) for dtype in DTYPES}
    return {**tensors, "none": torch.empty(0, 4), "scalar": torch.tensor(2.5), "turned": torch.randn(4, 3).t()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype is theirs[name].dtype and tensor.shape == theirs[name].shape
        assert not tensor.numel() or bytes(bytes_of(tensor.contiguous())) == bytes(bytes_of(theirs[name].contiguous()))


def test_tensors_are_read_as_they_were_written() -> None:
    tensors = drawn()
    found = tensors_in(file_of(tensors))
    assert_equal(found, tensors)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values() if tensor.numel())


def test_the_library_of_the_format_reads_and_writes_the_same(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {name: tensor.contiguous() for name, tensor in drawn().items()}
    assert_equal(safetensors.load(bytes(bytes_of(file_of(tensors)))), tensors)
    assert_equal(tensors_in(torch.frombuffer(bytearray(safetensors.save(tensors)), dtype=torch.uint8)), tensors)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\0" * 7, b"\xff" * 8 + b"{}", b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{"),
        b'\x3e\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}        ' + b"\0" * 4,
        b'\x3e\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}        ' + b"\0" * 8,
        b'\x3e\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}        ' + b"\0" * 5,
        b'\x3e\0\0\0\0\0\0\0{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}        ' + b"\0" * 4,
        b'\x3e\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}      ' + b"\0" * 4,
    ],
)
def test_other_bytes_are_refused(content: bytes) -> None:
    file = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(fusion.ArtifactError, match="safetensors"):
        tensors_in(file)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).eval()


def test_weights_are_swapped_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, x = model(), model(), torch.randn(5, 4)
    artifact = saved(first, tmp_path, x)
    assert artifact.state_dict().keys() == first.state_dict().keys()
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail("a program was started"))
    artifact.load_state_dict(second.state_dict())
    assert_like_eager(second, artifact, (x,))
    assert_like_eager(second, fusion.load(tmp_path / "program.fusion", weights=second.state_dict()), (x,))
    assert_like_eager(first, fusion.load(tmp_path / "program.fusion"), (x,))


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    artifact, state = saved(model(), tmp_path, torch.randn(5, 4)), model().state_dict()
    before = {name: tensor.clone() for name, tensor in artifact.state_dict().items()}
    for wrong, message in (
        ({**state, "0.bias": torch.zeros(4)}, r"0.bias is torch.float32 of shape \[4\]"),
        ({**state, "0.bias": torch.zeros(3).double()}, "0.bias is torch.float64"),
        ({**state, "other": torch.zeros(3)}, r"not known \['other'\]"),
        ({"0.bias": torch.zeros(3)}, r"missing \['0.weight', '1.bias'"),
    ):
        with pytest.raises(fusion.ArtifactError, match=message):
            artifact.load_state_dict(wrong)
    torch.testing.assert_close(artifact.state_dict(), before)
    artifact.load_state_dict({"0.bias": torch.ones(3), "other": torch.zeros(3)}, strict=False)
    assert artifact.state_dict()["0.bias"].tolist() == [1, 1, 1]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[0].weight
    artifact = saved(layers, tmp_path, torch.randn(2, 4))
    state = artifact.state_dict()
    assert state["0.weight"] is state["1.weight"] and len(artifact.manifest["tensors"]) == 3
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other[1].weight = other[0].weight
    artifact.load_state_dict(other.state_dict())
    assert_like_eager(other, artifact, (torch.randn(2, 4),))


def test_weights_lie_in_a_file_beside(tmp_path: Path) -> None:
    first, second, x, path = model(), model(), torch.randn(5, 4), tmp_path / "program.fusion"
    for _ in range(2):  # written, then found
        fusion.save(first, path, inputs=(x,), weights="weights.safetensors")
    assert_like_eager(first, fusion.load(path), (x,))
    with pytest.raises(fusion.ArtifactError, match=r"weights.safetensors holds another 0\.weight"):
        fusion.save(second, path, inputs=(x,), weights="weights.safetensors")
    fusion.save(second, tmp_path / "second.fusion", inputs=(x,), weights="second.safetensors")
    assert_like_eager(second, fusion.load(path, weights=tmp_path / "second.safetensors"), (x,))
    (tmp_path / "second.safetensors").replace(tmp_path / "weights.safetensors")
    with pytest.raises(fusion.ArtifactError, match="is not the file that"):
        fusion.load(path)
    with pytest.raises(fusion.ArtifactError, match="beside"):
        fusion.save(first, path, inputs=(x,), weights="/elsewhere/weights.safetensors")
