"""The files of graphs and of compiled modules: they run, and a wrong kernel shows in them."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch

import fusion
from fusion.dumps.fx_text import attributes_of
from fusion.dumps.graph_running import _verdict
from tests.fusion.dumps.programs import dumped, programs, run, run_alone


@pytest.mark.parametrize("name", programs())
def test_every_graph_and_module_runs(name: str, tmp_path: Path) -> None:
    folders = dumped(name, tmp_path)
    modules = sorted(tmp_path.glob("*/90_module.py"))
    graphs = [file for file in sorted(tmp_path.glob("*/*.py")) if file.name < "40_"]
    assert len(graphs) > len(folders) == len(modules)
    for file in graphs:
        code, said = run(file)
        assert code == 0 and "  result 0: " in said and "with PyTorch's operations" in said, said
    for file in modules:
        code, said = run(file)
        assert code == 0 and "  right: " in said and "WRONG" not in said, said
        assert re.search(r"\d+\.\d µs a run; \d+\.\d with PyTorch's operations", said)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of a model that is trained, for tests that only read it."""
    folder = tmp_path_factory.mktemp("model")
    dumped("model", folder)
    return folder


def test_graphs_between_passes_run(model: Path) -> None:
    """Those of a joint graph, and of the forward and backward that it is parted into, too."""
    between = [file for file in model.glob("*_joint/*.py") if file.name != "00_graph.py"]
    assert {"forward", "backward"} <= {file.suffixes[0][1:] for file in between}
    assert all("  result 0: " in run(file)[1] for file in between)


@pytest.mark.slow
def test_they_run_as_programs(model: Path) -> None:
    for file in (*model.glob("*/00_graph.py"), *model.glob("*/90_module.py")):
        done = run_alone(file)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_module_launches_the_kernels_of_its_folder(tmp_path: Path) -> None:
    (folder,) = dumped("lambda", tmp_path)
    (kernel,) = folder.glob("40_*.py")
    kernel.write_text(kernel.read_text().replace("* 2.0f", "* 2.01f"))
    code, said = run(folder / "90_module.py")
    assert code == 1 and "WRONG: result 0: error" in said


def test_a_changed_input_is_compared(tmp_path: Path) -> None:
    (folder,) = dumped("changed", tmp_path)
    assert "right: input 0: error" in run(folder / "90_module.py")[1]
    (kernel,) = folder.glob("40_*.py")
    kernel.write_text(kernel.read_text().replace("* 2.0f", "* 2.01f"))
    code, said = run(folder / "90_module.py")
    assert code == 1 and "WRONG: input 0: error" in said


def test_random_results_are_not_compared(model: Path) -> None:
    (forward,) = model.glob("*_forward")
    said = run(forward / "90_module.py")[1]
    assert "results that depend on random numbers are not compared" in said
    assert "result 0:" not in said and "right: result 1:" in said


def test_positions_get_the_ranges_that_kernels_check(tmp_path: Path) -> None:
    (folder,) = dumped("gather", tmp_path)
    assert re.search(r"torch\.int64, host=True, low=\S+, high=32\)", (folder / "00_graph.py").read_text())


def test_positions_that_backward_does_not_check_are_zero(tmp_path: Path) -> None:
    """PyTorch writes outside of a tensor where the positions of maxima are wrong."""
    torch._dynamo.reset()
    pool = torch.nn.AdaptiveMaxPool2d(3)
    fused = fusion.fuse(lambda x: pool(x).square(), options={"strict": True, "dump": tmp_path})
    fused(torch.randn(2, 3, 11, 11, requires_grad=True)).sum().backward()
    (folder,) = tmp_path.glob("*_backward")
    assert "torch.int8, host=True, low=0, high=0)" in (folder / "00_graph.py").read_text()
    assert run(folder / "00_graph.py")[0] == run(folder / "90_module.py")[0] == 0


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_constants_are_in_the_file(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    held = torch.randint(0, 2, shape).to(dtype)
    module = torch.nn.Module()
    module.register_buffer("held", held)
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("held"))
    (line,) = attributes_of(torch.fx.GraphModule(module, graph))
    again = types.SimpleNamespace()
    exec(line, {"module": again, "dumps": fusion.dumps, "torch": torch})
    assert torch.equal(again.held, held) and again.held.dtype is dtype and again.held.stride() == held.stride()


def test_a_deep_network_does_not_overflow(tmp_path: Path) -> None:
    """Half precision does after six layers whose weights are drawn with a deviation of one."""
    torch._dynamo.reset()
    layers = [layer for _ in range(7) for layer in (torch.nn.Linear(128, 128), torch.nn.ReLU())]
    network = torch.nn.Sequential(*layers).half()
    fused = fusion.fuse(network, options={"strict": True, "dump": tmp_path})
    fused(torch.randn(8, 128).half()).square().sum().backward()
    for file in tmp_path.glob("*ward/90_module.py"):
        code, said = run(file)
        assert code == 0 and "right: result 0" in said and not re.search(r"WRONG|unclear|inf", said), said


def test_results_that_overflow_in_pytorch_too_are_unclear() -> None:
    large = torch.tensor([float("inf"), 1.0])
    assert _verdict(torch.tensor([1e38, 1.0]), large, torch.tensor([1e39, 1.0], dtype=torch.float64))[0] == "unclear"
    assert _verdict(large, large, torch.tensor([1e39, 1.0], dtype=torch.float64))[0] == "right"
    assert _verdict(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))[0] == "WRONG"


def test_a_module_in_chunks_runs(tmp_path: Path) -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ weight, labels)

    torch._dynamo.reset()
    fused = fusion.fuse(loss, options={"strict": True, "dump": tmp_path, "workspace": 1 << 16})
    x, weight = torch.randn(280, 260, requires_grad=True), torch.randn(260, 1003, requires_grad=True)
    fused(x, weight, torch.randint(0, 1003, (280,))).backward()
    (folder,) = tmp_path.glob("*_forward")
    assert "in_chunks" in (folder / "90_module.py").read_text()
    parts = sorted(folder.glob("chunks_*/90_module.py"))
    assert parts and all("run ../90_module.py" in run(part)[1] for part in parts)
    for file in tmp_path.glob("*ward/90_module.py"):
        code, said = run(file)
        assert code == 0 and "right: result 0" in said, said


def test_a_graph_that_a_file_cannot_hold_says_so(tmp_path: Path) -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() * 3, (x,))

    torch._dynamo.reset()
    fusion.fuse(chosen, options={"strict": True, "dump": tmp_path})(torch.randn(5))
    for name in ("00_graph.py", "90_module.py"):
        (file,) = tmp_path.glob(f"*_inference/{name}")
        assert run(file)[1].startswith("This file does not run by itself: it needs ")
    for file in tmp_path.glob("*_inference_body/90_module.py"):
        assert "right: result 0" in run(file)[1]
