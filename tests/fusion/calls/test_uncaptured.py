"""A fused program of which nothing is captured says so once, with what to do; one that is captured says nothing."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import fusion
from fusion.calls.fallback import warn_once

X = torch.linspace(-1, 2, 12).view(3, 4)


@pytest.fixture(autouse=True)
def _afresh() -> None:
    warn_once.cache_clear()
    torch._dynamo.reset()


def said(call: Callable[[], object], *, again: Callable[[], object] | None = None) -> str:
    """Return the only warning of a call; a second call must not warn."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    (warning,) = [each for each in found if issubclass(each.category, fusion.FusionWarning)]
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        (again or call)()
    return str(warning.message)


def silent(call: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        return call()


def test_a_module_of_which_nothing_is_captured() -> None:
    fused = fusion.fuse(nn.LSTM(4, 5))
    message = said(lambda: fused(X))
    assert "captures nothing of LSTM: left to eager" in message and "fuse what is around it" in message


@pytest.mark.parametrize("layer", [nn.LSTM(4, 5), nn.GRU(4, 5), nn.RNN(4, 5)], ids=["LSTM", "GRU", "RNN"])
def test_a_function_of_which_nothing_is_captured(layer: nn.Module) -> None:
    def recurrent(x: Tensor) -> Tensor:
        return torch.relu(layer(x)[0])

    fused = fusion.fuse(recurrent)
    message = said(lambda: fused(X))
    assert "captures nothing of recurrent: left to eager: recurrent (test_uncaptured.py:" in message
    assert message.endswith("does not support RNN, GRU, or LSTM; fuse what is around it")
    torch.testing.assert_close(fused(X), recurrent(X))
    assert not fusion.report(fused).kernels


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors(layout: torch.layout) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(4, 2)

    sparse = X.to_sparse(layout=layout)
    for program in (fusion.fuse(Product()), fusion.fuse(lambda x: x @ torch.ones(4, 2))):
        assert "give it dense tensors (to_dense)" in said(lambda program=program: program(sparse))
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_modules() -> None:
    linear = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    try:
        quantised = torch.ao.quantization.quantize_dynamic(linear, {nn.Linear}, dtype=torch.qint8)
    except RuntimeError as error:
        pytest.skip(f"no quantised engine: {error}")
    for program in (fusion.fuse(quantised), fusion.fuse(lambda x: quantised(x))):
        assert "quantise with torchao" in said(lambda program=program: program(X))
        torch._dynamo.reset()


def test_a_call_within_vmap_or_grad() -> None:
    def squared(x: Tensor) -> Tensor:
        return (x * x).sum()

    fused = fusion.fuse(squared)
    message = said(lambda: torch.vmap(fused)(X))
    assert message.startswith("running eagerly: squared is called within a transform of torch.func: fuse the function")
    around = fusion.fuse(torch.vmap(squared))
    torch.testing.assert_close(silent(lambda: around(X)), (X * X).sum(1))
    assert fusion.report(around).kernels
    warn_once.cache_clear()
    assert "within a transform" in said(lambda: torch.func.grad(fused)(X))
    gradient = fusion.fuse(torch.func.grad(squared))
    torch.testing.assert_close(silent(lambda: gradient(X)), 2 * X)


def test_a_call_within_a_mode() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    class Passed(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    module = fusion.fuse(nn.Softmax(-1))

    def within(mode: TorchDispatchMode | TorchFunctionMode) -> Tensor:
        with mode:
            result: Tensor = module(X)
        return result

    assert "Softmax is called within a dispatch mode" in said(lambda: within(Seen()))
    torch.testing.assert_close(silent(lambda: within(Passed())), torch.softmax(X, -1))
    assert fusion.report(module).kernels, "a mode over functions turns nothing off"


def test_modes_of_another_thread() -> None:
    """PyTorch's flag stays set where two threads leave their modes in the order in which they entered them."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    first_left = threading.Event()
    both_entered = threading.Barrier(2)

    def second() -> None:
        first_entered.wait()
        with Mode():
            both_entered.wait()
            first_left.wait()

    first_entered = threading.Event()
    thread = threading.Thread(target=second)
    thread.start()
    with Mode():
        first_entered.set()
        both_entered.wait()
    first_left.set()
    thread.join()
    try:
        module = fusion.fuse(nn.Softmax(-1))
        silent(lambda: module(X))
        assert fusion.report(module).kernels
    finally:
        for flag in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"):
            setattr(_python_dispatch, flag, False)


def test_data_parallel_modules() -> None:
    """A group that sends nothing: the threads of a real one, which need the GIL, may hang where the group ends."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=1)
    try:
        network = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(network))
        message = said(lambda: fusion.fuse(parallel)(X))
        assert message.endswith("wrap the fused module: DistributedDataParallel(fusion.fuse(module))")
        fused = fusion.fuse(network)
        wrapped = nn.parallel.DistributedDataParallel(fused)
        silent(lambda: wrapped(X))
        assert fusion.report(fused).kernels
    finally:
        torch.distributed.destroy_process_group()


class Stepping(nn.Module):
    """A module that a framework trains: it calls the steps, not the module."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.network(x))

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return self.network(batch).relu().sum()

    def validation_step(self, batch: Tensor, number: int) -> Tensor:
        result: Tensor = self(batch)
        return result

    def optimizer_step(self) -> None:
        self.stepped = True


def test_a_step_that_does_not_call_the_module() -> None:
    fused = fusion.fuse(Stepping())
    message = said(lambda: fused.training_step(X, 0))
    assert message.startswith("running eagerly: Stepping.training_step computes without a call of the fused module")
    silent(lambda: fused.validation_step(X, 0))
    assert fusion.report(fused).kernels
    fused.optimizer_step()
    assert fused.stepped and isinstance(fused, Stepping) and fused.training_step.__name__ == "training_step"


def test_a_step_that_calls_forward_by_name_says_one_thing() -> None:
    class ByName(Stepping):
        def training_step(self, batch: Tensor, number: int) -> Tensor:
            return self.forward(batch).sum()

    fused = fusion.fuse(ByName())
    message = said(lambda: fused.training_step(X, 0))
    assert message == (
        "running eagerly: ByName.training_step calls ByName.forward by name: call the fused module, which calls it"
    )
    said(lambda: fused.forward(X))


def test_a_step_that_calls_another_fused_module() -> None:
    module = Stepping()
    module.network = fusion.fuse(module.network)
    silent(lambda: fusion.fuse(module).training_step(X, 0))
    assert fusion.report(module.network).kernels


def test_steps_follow_copies_and_pickles() -> None:
    fused = fusion.fuse(Stepping())
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), fusion.fuse(fused)):
        warn_once.cache_clear()
        said(lambda other=other: other.forward(X))
        torch.testing.assert_close(other(X), fused(X))
        warn_once.cache_clear()
        said(lambda other=other: other.training_step(X, 0))
        with torch.no_grad():
            other.network.weight.zero_()
        assert (other.training_step(X, 0) == other.network.bias.relu().sum() * 3).all()
    assert "training_step" not in vars(Stepping())


def test_forward_called_by_name() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
            return torch.tanh(x) * factor

    fused = fusion.fuse(Named())
    message = said(lambda: fused.forward(X))
    assert message == "running eagerly: Named.forward is called by name: call the fused module, which calls it"
    assert not fusion.report(fused).kernels
    warn_once.cache_clear()
    torch.testing.assert_close(silent(lambda: fused(X)), X.tanh() * 2)
    assert fusion.report(fused).kernels
    assert inspect.signature(fused.forward) == inspect.signature(Named().forward)


def test_forward_within_a_call_of_a_fused_program_is_a_part_of_it() -> None:
    inner = fusion.fuse(Stepping())
    outer = fusion.fuse(lambda x: inner.forward(x).exp(), fullgraph=True)
    torch.testing.assert_close(silent(lambda: outer(X)), inner.network(X).tanh().exp())
    assert {"tanh", "exp"} <= {origin.name for kernel in fusion.report(outer).kernels for origin in kernel.origins}
    whole = fusion.fuse(nn.Sequential(inner, nn.ReLU()), fullgraph=True)
    torch.testing.assert_close(silent(lambda: whole(X)), inner.network(X).tanh().relu())

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inner.forward(x) * 2

    broken = fusion.fuse(broken)
    torch.testing.assert_close(silent(lambda: broken(X)), inner.network(X).tanh() * 2)


def test_an_own_forward_of_an_instance_stays_its_own() -> None:
    module = Stepping()
    module.forward = lambda x: module.network(x) * 3
    fused = fusion.fuse(module)
    said(lambda: fused.forward(X))
    warn_once.cache_clear()
    torch.testing.assert_close(silent(lambda: fused(X)), module.network(X) * 3)
    again = fusion.fuse(fused)
    torch.testing.assert_close(silent(lambda: again(X)), module.network(X) * 3)
    fused.forward = lambda x: x * 2  # as frameworks patch it
    torch._dynamo.reset()
    torch.testing.assert_close(silent(lambda: fused(X)), X * 2)


def test_many_modules_of_one_class_share_what_was_compiled_of_their_forward() -> None:
    class Shared(Stepping):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.network(x))

    modules = [fusion.fuse(Shared()) for _ in range(12)]
    for module in modules:
        with torch.no_grad():
            torch.testing.assert_close(silent(lambda module=module: module(X)), module.network(X).sigmoid())
    assert len(fusion.report(modules[-1]).graphs) == 1


def test_programs_that_are_captured_or_compute_nothing_are_silent() -> None:
    silent(lambda: fusion.fuse(nn.Identity())(X))
    silent(lambda: fusion.fuse(lambda x: x)(X))
    silent(lambda: fusion.fuse(lambda x: X if x is None else x)(X))
    model = fusion.fuse(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    silent(lambda: model(X))
    assert fusion.report(model).kernels


def test_a_fused_function_within_another_program_is_a_part_of_it() -> None:
    inner = fusion.fuse(lambda x: torch.exp(x))
    outer = fusion.fuse(lambda x: inner(x).sum(-1))
    torch.testing.assert_close(silent(lambda: outer(X)), X.exp().sum(-1))
    (kernel,) = fusion.report(outer).kernels
    assert len(kernel.origins) == 2


def test_a_fused_function_is_compiled_by_another_backend() -> None:
    fused = fusion.fuse(lambda x: torch.exp(x) + 1)
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        seen.append(graph)
        return graph

    torch.testing.assert_close(torch.compile(fused, backend=backend)(X), X.exp() + 1)
    assert len(seen) == 1
    torch.testing.assert_close(silent(lambda: fused(X)), X.exp() + 1)
    assert fusion.report(fused).kernels
