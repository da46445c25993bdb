"""`fuse`, `explain`, `report` and `torch.compile(backend="fusion")` as used by users."""

from __future__ import annotations

import copy
import functools
import io
import linecache
import os
import warnings
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion
import fusion.calls.reports
import fusion.compilation.graph_compiler
from fusion.backend import backend_of
from fusion.codegen.build import KernelBuilder
from fusion.codegen.targets import builder_for


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(torch.tanh(self.layer(x))))


def test_module_keeps_its_type_and_state() -> None:
    net = Net().eval()
    fused = fusion.fuse(net)
    assert type(fused) is Net and fused is not net
    assert fused.state_dict().keys() == net.state_dict().keys()
    assert fused.layer.weight is net.layer.weight
    x = torch.randn(5, 8)
    torch.testing.assert_close(fused(x), net(x))
    assert fusion.report(fused).kernels
    with torch.no_grad():
        net.layer.weight.mul_(2)
    torch.testing.assert_close(fused(x), net(x))


def test_original_module_is_left_alone() -> None:
    net = Net().eval()
    fused = fusion.fuse(net)
    before = len(fusion.report(fused).graphs)
    net(torch.randn(5, 8))
    assert len(fusion.report(fused).graphs) == before


def test_train_and_eval() -> None:
    torch.manual_seed(0)
    fused = fusion.fuse(Net())
    x = torch.randn(64, 8)
    first, second = fused.train()(x), fused(x)
    zeros = float((first == 0).float().mean())
    assert 0.3 < zeros < 0.7 and not torch.equal(first, second)  # dropout is fresh each call
    fused.eval()
    torch.testing.assert_close(fused(x), fused(x))


def test_dropout_repeats_under_a_seed() -> None:
    fused = fusion.fuse(lambda x: torch.nn.functional.dropout(x, 0.3) * 2)
    x = torch.ones(1000)
    torch.manual_seed(3)
    first = fused(x)
    torch.manual_seed(3)
    assert torch.equal(first, fused(x))
    kept = first[first != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / 0.7))


def test_batch_norm_updates_its_statistics() -> None:
    net = Net().train()
    net.drop.p = 0.0
    twin = copy.deepcopy(net)
    x = torch.randn(32, 8)
    torch.testing.assert_close(fusion.fuse(net)(x), twin(x))
    torch.testing.assert_close(net.norm.running_mean, twin.norm.running_mean)
    torch.testing.assert_close(net.norm.running_var, twin.norm.running_var)


def test_deepcopy_is_fused_and_independent() -> None:
    fused = fusion.fuse(Net().eval())
    twin = copy.deepcopy(fused)
    x = torch.randn(5, 8)
    with torch.no_grad():
        twin.layer.weight.zero_()
    assert not torch.equal(fused(x), twin(x))
    assert fusion.report(twin).kernels


def test_saved_and_loaded() -> None:
    fused = fusion.fuse(Net().eval())
    x = torch.randn(5, 8)
    expected = fused(x)
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), expected)


def test_hooks_run() -> None:
    net = Net().eval()
    seen: list[torch.Size] = []
    net.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    fusion.fuse(net)(torch.randn(5, 8))
    assert seen == [torch.Size([5, 8])]


def test_decorator_with_and_without_arguments() -> None:
    @fusion.fuse
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    @fusion.fuse(dynamic=False, options={"strict": True})
    def configured(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    x = torch.randn(7)
    torch.testing.assert_close(plain(x), x.exp() + 1)
    torch.testing.assert_close(configured(x), x.exp() + 1)
    assert plain.__name__ == "plain"


def test_torch_compile_by_name() -> None:
    f = torch.compile(lambda x: torch.relu(x) * 2, backend="fusion", options={"strict": True})
    x = torch.randn(9)
    torch.testing.assert_close(f(x), torch.relu(x) * 2)


@pytest.mark.parametrize("wrong", [3, "model", [torch.nn.Linear(2, 2)], Net])
def test_fuse_takes_modules_and_functions_only(wrong: object) -> None:
    with pytest.raises(TypeError, match="fuse takes"):
        fusion.fuse(wrong if wrong != "model" else "model")


def test_wrong_settings_name_the_right_ones() -> None:
    with pytest.raises(ValueError, match="known: default"):
        fusion.fuse(torch.relu, mode="fastest")
    with pytest.raises(ValueError, match="strict"):
        fusion.fuse(torch.relu, options={"strickt": True})
    with pytest.raises(TypeError, match="bool"):
        fusion.fuse(torch.relu, options={"strict": 1})
    with pytest.raises(TypeError, match="dynamic"):
        fusion.fuse(torch.relu, dynamic="yes")
    with pytest.raises(TypeError, match="fullgraph must be True or False, got 1"):
        fusion.fuse(torch.relu, fullgraph=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'target'"):
        fusion.fuse(torch.relu, target="c")
    with pytest.raises(TypeError, match=r"takes mode, dynamic, fullgraph and options, got \['target'\]"):
        fusion.explain(torch.relu, target="c")
    with pytest.raises(TypeError, match="report takes what fuse or"):
        fusion.report(torch.relu)


class Breaking(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


@pytest.mark.parametrize("program", [broken, Breaking()], ids=["function", "module"])
def test_with_fullgraph_a_graph_break_is_an_error(program: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(5)
    expected = x * 2 + 1
    torch.testing.assert_close(fusion.fuse(program)(x), expected)  # the next test compiles anew
    whole = fusion.fuse(program, fullgraph=True)
    runs = [whole, fusion.explain(program, fullgraph=True), fusion.accuracy(program, fullgraph=True)]
    if isinstance(whole, torch.nn.Module):
        saved = io.BytesIO()
        torch.save(whole, saved)
        saved.seek(0)
        runs += [copy.deepcopy(whole), torch.load(saved, weights_only=False)]
    for run in runs:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            run(x)
    torch.testing.assert_close(fusion.fuse(fullgraph=True)(lambda x: x * 2 + 1)(x), expected)
    assert fusion.explain(program)(x).graph_breaks and not fusion.explain(torch.relu, fullgraph=True)(x).graph_breaks


def test_unknown_operations_are_called_and_named() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.pinv(x.exp()) * 2

    explanation = fusion.explain(f)(torch.eye(5) + 0.1)
    assert any("linalg_pinv" in extern.name for extern in explanation.externs)
    assert len(explanation.kernels) == 2
    torch.testing.assert_close(fusion.fuse(f)(torch.eye(5)), f(torch.eye(5)))


def test_complex_and_data_dependent_programs_are_right() -> None:
    def complex_part(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x * 2).abs() + 1

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    x = torch.randn(16)
    torch.testing.assert_close(fusion.fuse(complex_part)(x), complex_part(x))
    for sign in (1, -1):
        torch.testing.assert_close(fusion.fuse(branches)(x.abs() * sign), branches(x.abs() * sign))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), ()])
def test_empty_and_scalar_tensors(shape: tuple[int, ...]) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp() + 1, x.sum()

    x = torch.randn(shape)
    for got, expected in zip(fusion.fuse(f, options={"strict": True})(x), f(x), strict=True):
        torch.testing.assert_close(got, expected)


def test_inputs_are_changed_in_place_as_eager_would() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        view = x[1:]
        view.add_(1)
        return view.sum()

    x = torch.randn(6, 3)
    twin = x.clone()
    torch.testing.assert_close(fusion.fuse(f)(x), f(twin))
    torch.testing.assert_close(x, twin)


def test_outputs_alias_as_eager() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, y.t()

    y, t = fusion.fuse(f)(torch.randn(3, 4))
    assert t.data_ptr() == y.data_ptr() and t.stride() == (1, 4)


def test_sizes_may_change() -> None:
    f = fusion.fuse(lambda x: torch.softmax(x * 2, -1), dynamic=True, options={"strict": True})
    for rows, columns in ((3, 70), (5, 71), (9, 200), (2, 3000)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(f(x), torch.softmax(x * 2, -1))
    assert len(fusion.report(f).graphs) == 1


def _broken(*args: object, **kwargs: object) -> None:
    raise RuntimeError("a defect")


def test_failure_runs_eagerly_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion.compilation.graph_compiler, "compile_graph", _broken)
    f = fusion.fuse(lambda x: x.exp() + 1)
    x = torch.randn(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(f(x), x.exp() + 1)
    (said,) = (warning for warning in caught if issubclass(warning.category, fusion.FusionWarning))
    assert said.filename == __file__ and "f(x)" in linecache.getline(said.filename, said.lineno)
    assert "a defect" in fusion.report(f).graphs[0].failure


def test_strict_raises_with_the_line_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion.compilation.graph_compiler, "compile_graph", _broken)
    monkeypatch.setenv("FUSION_STRICT", "1")
    with pytest.raises(Exception, match=r"a defect[\s\S]*test_fuse\.py:\d+"):
        fusion.fuse(lambda x: x.exp() + 1)(torch.randn(5))


def test_reports_of_the_oldest_graphs_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion.calls.reports, "MOST_REPORTS", 2)
    fused = fusion.fuse(lambda x: x.exp() + 3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        fused(torch.ones(5, dtype=dtype))
    sources = [graph.kernels[0].source for graph in fusion.report(fused).graphs]
    assert len(sources) == 2 and "double *restrict" in sources[0] and "uint16_t *restrict" in sources[1]


def test_kernels_name_the_lines_of_the_program() -> None:
    """Lines of PyTorch's modules are not named, nor those of wrappers under a default device."""
    norm = torch.nn.LayerNorm(8)

    def f(x: torch.Tensor) -> torch.Tensor:
        return norm(torch.sigmoid(x) * 3)

    with torch.device("cpu"):
        (kernel,) = fusion.explain(f)(torch.randn(4, 8)).kernels
    file, number = os.path.basename(__file__), f.__code__.co_firstlineno + 1
    assert {origin.line for origin in kernel.origins} == {f"{file}:{number}"}


def test_kernels_of_pytorchs_modules_name_these_and_no_line() -> None:
    """No line of a program calls them, only wrappers do."""
    model = fusion.fuse(torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.GELU()))
    model(torch.randn(4, 8))
    (kernel,) = fusion.report(model).kernels
    assert {(origin.module, origin.line) for origin in kernel.origins} == {("0", ""), ("1", "")}


def test_the_dump_shows_every_stage_of_the_path(tmp_path: object) -> None:
    fusion.fuse(lambda x: torch.softmax(x, -1), options={"dump": str(tmp_path)})(torch.randn(4, 9))
    captured, folder = sorted(tmp_path.iterdir())
    assert captured.name.endswith("_captured") and (captured / "00_graph.py").exists()
    names = sorted(path.name for path in folder.iterdir())
    grown = {"26_grow_clusters.dot", "26_grow_clusters.txt"}
    assert {"00_graph.py", "01_program.txt", *grown, "28_make_kernels.txt"} <= {*names}
    texts = [path.read_text() for path in sorted(folder.glob("0*.txt"))]
    assert all(before != after for before, after in pairwise(texts)), "a pass that changed nothing has no file"
    assert any(name.startswith("40_") and name.endswith(".py") for name in names) and names[-3:] == [
        "90_module.py",
        *names[-2:],
    ]
    assert names[-2:] == ["98_passes.txt", "99_report.txt"]
    assert all(f"{stage}/" in (folder / "98_passes.txt").read_text() for stage in ("program", "clusters", "launches"))
    assert "amax_sub_exp_sum_div" in (folder / "90_module.py").read_text()


def test_many_instances_share_a_compilation() -> None:
    """Dynamo compiles the same code for at most eight different backends and then runs eagerly, silently."""

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(x)) * 2

    x = torch.randn(3, 4)
    instances = [fusion.fuse(Small().eval()) for _ in range(12)]
    for fused in instances:
        torch.testing.assert_close(fused(x), torch.relu(fused.layer(x)) * 2)
    assert len(fusion.report(instances[-1]).graphs) == 1
    for _ in range(12):
        assert fusion.explain(instances[0].forward)(x).kernels


def test_a_report_without_a_call_says_so() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    first = torch.compile(doubled, backend="fusion")
    assert "it was not called" in str(fusion.report(first)) and "it was not called" in str(
        fusion.report(fusion.fuse(doubled))
    )
    first(torch.ones(3))
    assert fusion.report(first).kernels
    assert not fusion.report(torch.compile(doubled, backend="fusion")).graphs


def test_decorated_modules_have_a_code_each() -> None:
    """Dynamo begins at the code of the decorator, and compiles one code for at most eight programs."""

    def decorated(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(forward)
        def wrapper(self: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
            return forward(self, *args)

        return wrapper

    def of_width(width: int) -> type[torch.nn.Module]:
        class Small(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, width)

            @decorated
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(self.layer(x)) * 2

        return Small

    x = torch.randn(3, 4)
    for width in range(1, 11):
        kind = of_width(width)
        graphs = []
        for _ in range(2):
            fused = fusion.fuse(kind().eval())
            torch.testing.assert_close(fused(x), torch.relu(fused.layer(x)) * 2)
            graphs.append(len(backend_of(fused).reports))
            assert len(fusion.report(fused).graphs) == 1
        assert graphs == [width, width], "every width is compiled, once"
        assert not fusion.report(fused).graph_breaks


def test_several_threads_at_once() -> None:
    """After compilation: PyTorch itself refuses to trace in one thread while another calls the same function."""
    from concurrent.futures import ThreadPoolExecutor

    f = fusion.fuse(lambda x: torch.softmax(x, -1) + 1)
    x = torch.randn(30, 40)
    expected = torch.softmax(x, -1) + 1
    f(x)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(f, [x] * 16):
            torch.testing.assert_close(got, expected)


def test_torchscript_is_refused() -> None:
    with pytest.raises(TypeError, match="TorchScript"):
        fusion.fuse(torch.jit.script(torch.nn.Linear(3, 2)))


def test_the_target_of_an_accelerator_prepares_while_pytorch_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def builder(device: str, *others: object) -> KernelBuilder:
        asked.append(device)
        return builder_for("cpu", "reference")

    monkeypatch.setattr("fusion.compilation.graph_compiler.builder_for", builder)
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    compiling = fusion.Backend(fusion.Options.read())._regions
    compiling._begin([torch.ones(2), 3])
    assert not asked  # C needs nothing beforehand
    compiling._begin([torch.ones(2), x, x])
    assert asked == ["cuda"]
