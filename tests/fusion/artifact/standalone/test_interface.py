"""What the C interface says and refuses: signatures, errors, weights, layouts, threads."""

from __future__ import annotations

import platform
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import fusion
from fusion.artifact.weights import pieces
from fusion.codegen.c.standalone import library as library_of
from tests.fusion.artifact.standalone.calling import Library, LibraryError, exported


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        return {"scores": self.linear(x).softmax(-1), "calls": self.calls * 1}


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("library") / "libmodel.so"
    rows = ({0: Dim("rows", max=64)},)
    fusion.export_library(model(), result, inputs=(torch.randn(4, 6),), dynamic_shapes=rows)
    return result


def test_the_files(path: Path) -> None:
    assert sorted(file.name for file in path.parent.iterdir()) == ["fusion.h", "libmodel.so", "model.safetensors"]


def test_the_signature(path: Path) -> None:
    library = Library(path)
    size = library.conditions[0].removeprefix("1 <= ")
    assert library.conditions == [f"1 <= {size}", f"{size} <= 64"]
    assert library.described("input") == [f"x: torch.float32[{size}, 6]"]
    assert library.described("output") == [
        f"result['scores']: torch.float32[{size}, 5]",
        "result['calls']: torch.float32[2]",
    ]
    assert not library.library.fusion_input(1) and not library.library.fusion_output(-1)


def test_buffers_that_are_changed_are_those_of_one_model(path: Path) -> None:
    before = path.with_name("model.safetensors").read_bytes()
    first, second, x = Library(path), Library(path), torch.randn(3, 6)
    counts = [library(x)[1].tolist() for library in (first, first, second)]
    assert counts == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    assert path.with_name("model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(4, 7), r"x has shape \[4, 7\], and the program is for \[\w+, 6\]"),
        (torch.randn(6), r"x has shape \[6\], and the program is for \[\w+, 6\]"),
        (torch.randn(65, 6), r"the program is for sizes with \w+ <= 64, and \w+ = 65"),
        (torch.randn(0, 6), r"the program is for sizes with 1 <= \w+, and \w+ = 0"),
        (torch.randn(4, 6).double(), "x is of float64, and the program is for float32"),
        (torch.randn(4, 6).bfloat16(), "x is of bfloat16, and the program is for float32"),
    ],
)
def test_other_arguments_are_refused(x: torch.Tensor, message: str, path: Path) -> None:
    library = Library(path)
    with pytest.raises(LibraryError, match=message):
        library(x)
    assert library(torch.randn(2, 6))[1].tolist() == [1.0, 1.0]


def test_outputs_that_are_given_are_written_to(path: Path) -> None:
    library, x = Library(path), torch.randn(7, 6)
    scores, calls = torch.empty(5, 7).t(), torch.empty(4)[::2]
    library.into([x], [scores, calls])
    torch.testing.assert_close(scores, model()(x)["scores"].detach())
    assert calls.tolist() == [1.0, 1.0]
    with pytest.raises(LibraryError, match=r"result\['scores'\] has shape \[7, 6\]"):
        library.into([x], [torch.empty(7, 6), calls])
    memory = torch.empty(100)
    with pytest.raises(LibraryError, match="is written to, and shares memory with another tensor"):
        library.into([memory[:42].view(7, 6)], [memory[40:75].view(7, 5), calls])


def test_weights_are_replaced_without_compiling(path: Path, tmp_path: Path) -> None:
    other, x = model(), torch.randn(3, 6)
    with torch.no_grad():
        other.linear.weight.mul_(3)
    (tmp_path / "other.safetensors").write_bytes(b"".join(map(bytes, pieces(other.state_dict()))))
    torch.testing.assert_close(Library(path, tmp_path / "other.safetensors")(x)[0], other(x)["scores"].detach())


def test_weights_as_other_writers_lay_them_out(path: Path, tmp_path: Path) -> None:
    """A header with metadata, blanks and escapes, and data that begins anywhere."""
    state = model().state_dict()
    header, data = '{ "__metadata__" : {"format":"pt", "note":"}]\\""} ', b""
    for name in ("linear.bias", "calls", "linear.weight"):
        raw = state[name].numpy().tobytes()
        shape = ", ".join(map(str, state[name].shape))
        written = name.replace("l", "\\u006c").replace("w", "\\u0077")
        header += f', "{written}":{{"shape":[{shape}],"other":[{{"a":1}}],\n"data_offsets":[{len(data)},'
        header += f'{len(data) + len(raw)}],"dtype":"F32"}}'
        data += raw
    header += "}" + " " * (3 - len(header + "}") % 4)
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)
    assert (8 + len(header)) % 4, "data is aligned by chance"
    x = torch.randn(3, 6)
    torch.testing.assert_close(Library(path, file)(x)[0], model()(x)["scores"].detach())


def test_other_weights_are_refused(path: Path, tmp_path: Path) -> None:
    state = model().state_dict()
    damaged = {
        "absent": None,
        "short": b"abc",
        "long": (1 << 40).to_bytes(8, "little") + b"{}",
        "no text": (8).to_bytes(8, "little") + b'{"calls"',
        "without": b"".join(map(bytes, pieces({name: state[name] for name in ("calls", "linear.bias")}))),
        "dtype": b"".join(map(bytes, pieces({name: value.double() for name, value in state.items()}))),
        "shape": b"".join(map(bytes, pieces({name: value[:1] for name, value in state.items()}))),
        "cut": path.with_name("model.safetensors").read_bytes()[:-9],
    }
    messages = {
        "absent": "cannot be read: No such file",
        "short": "is too short",
        "long": "the header is too long",
        "no text": "are not in the safetensors format",
        "without": "the weights have no linear.weight",
        "dtype": "has another dtype or shape in the weights",
        "shape": "has another dtype or shape in the weights",
        "cut": "has other bytes in the weights than its shape says",
    }
    for name, content in damaged.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(LibraryError, match=messages[name]):
            Library(path, tmp_path / name)


def test_weights_beside_an_artifact_serve_both(tmp_path: Path) -> None:
    program, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    fusion.save(program, tmp_path / "model.fusion", inputs=(x,), weights="shared.safetensors")
    fusion.export_library(program, tmp_path / "libmodel.so", inputs=(x,), weights="shared.safetensors")
    torch.testing.assert_close(Library(tmp_path / "libmodel.so")(x), fusion.load(tmp_path / "model.fusion")(x))
    assert not (tmp_path / "model.safetensors").exists()


def test_another_cpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without a feature: the text asks for one that no CPU has."""
    if platform.machine() != "x86_64":
        pytest.skip("features are those of x86-64")
    real = library_of.program_text
    text = lambda *args: real(*args).replace('__builtin_cpu_supports("avx2")', "0")  # noqa: E731
    monkeypatch.setattr(library_of, "program_text", text)
    with pytest.raises(LibraryError, match="this CPU lacks avx2, which the library was compiled for"):
        exported(lambda x: x + 1, tmp_path, torch.randn(3), arch="x86-64-v3")


def test_an_index_out_of_range_is_an_error(tmp_path: Path) -> None:
    library = exported(nn.Embedding(10, 4).eval(), tmp_path, torch.tensor([1, 2, 3]))
    with pytest.raises(LibraryError, match=r"such as an index, is out of range for \w+ \(.+\.py:\d+\)"):
        library(torch.tensor([1, 10, 3]))
    assert library(torch.tensor([9, 0, 1])).shape == (3, 4)


def test_one_model_runs_in_several_threads(tmp_path: Path) -> None:
    program = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 7)).eval()
    library = exported(program, tmp_path, torch.randn(4, 64), dynamic_shapes=({0: Dim("rows", max=64)},))
    inputs = [torch.randn(rows, 64) for rows in range(2, 26)]
    found: dict[int, list[torch.Tensor]] = {}

    def run(number: int) -> None:
        found[number] = [library(x) for x in inputs for _ in range(4)]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        expected = [program(x) for x in inputs for _ in range(4)]
    for results in found.values():
        torch.testing.assert_close(results, expected)
    assert len(found) == 4


def test_any_number_of_threads(tmp_path: Path) -> None:
    library, x = exported(lambda x: x.exp().sum(0), tmp_path, torch.randn(3000, 300)), torch.randn(3000, 300)
    for threads in (1, 3, 0):
        library.library.fusion_set_threads(library.model, threads)
        torch.testing.assert_close(library(x), x.exp().sum(0))


def test_operations_that_are_not_generated_are_listed(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.fft.fft(x), torch.poisson(x)

    with pytest.raises(fusion.Unsupported, match=r"cannot call: aten\._fft_r2c.*, aten\.poisson") as refusal:
        exported(program, tmp_path, torch.randn(4, 3))
    assert "fusion.save keeps them" in str(refusal.value)
    with pytest.raises(fusion.Unsupported, match=r"which a library cannot call"):
        exported(lambda x: x.nonzero(), tmp_path, torch.randn(4, 3))
    with pytest.raises(fusion.Unsupported, match=r"is no tensor"):
        exported(lambda x: (x * 2, x.shape[0]), tmp_path, torch.randn(4, 3), dynamic_shapes=({0: Dim("n")},))
    assert not [*tmp_path.iterdir()]


def test_weights_that_were_damaged_are_refused(tmp_path: Path) -> None:
    """One bit anywhere in a tensor; as a file of its own it may hold any numbers."""
    program, x = model(), torch.randn(4, 6)
    fusion.export_library(program, tmp_path / "libmodel.so", inputs=(x,))
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in (begin, (begin + len(whole)) // 2, len(whole) - 1):
        weights.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(LibraryError, match=r"\S+ in \S*model\.safetensors has other numbers than the program"):
            Library(tmp_path / "libmodel.so")
        Library(tmp_path / "libmodel.so", weights)(x)
    weights.write_bytes(whole)
    torch.testing.assert_close(Library(tmp_path / "libmodel.so")(x)[0], program(x)["scores"].detach())


def test_weights_of_every_length_are_summed(tmp_path: Path) -> None:
    """Sums take eight bytes at a time, and the rest one by one."""

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for size in range(1, 20):
                self.register_buffer(f"part_{size}", torch.randint(-128, 127, (size,), dtype=torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + sum(part.sum() for part in self.buffers())

    program, x = Parts(), torch.randn(3)
    fusion.export_library(program, tmp_path / "libmodel.so", inputs=(x,))
    torch.testing.assert_close(Library(tmp_path / "libmodel.so")(x), program(x))
