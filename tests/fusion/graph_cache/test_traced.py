"""What is kept of AOTAutograd's result: data, from which an equal result is made."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._functorch._aot_autograd.functional_utils import ViewMetaSequence

from fusion.backend import Backend
from fusion.codegen.cache import kept
from fusion.graph_cache import regions, traced
from fusion.graph_cache.serialise import Unwritten, read, write
from fusion.graph_cache.store import get
from fusion.graph_cache.traced import KINDS, CompiledRegion, Traced, described, result_of
from fusion.options import Options
from tests.fusion.graph_cache.starts import leaf, no_tracing, run


def waves(x: Tensor) -> Tensor:
    return x.sin().exp()


def mutated_views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    y.mul_(2)
    both = (x * y).split(2)
    return *both, both[0].t(), x.unsqueeze(0)[..., 1:], y.view(-1), x


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """AOTAutograd's results that are kept."""
    seen: list[Any] = []

    def watched(result: Any, *facts: Any) -> Traced:
        seen.append(result)
        return described(result, *facts)

    monkeypatch.setattr(regions, "described", watched)
    return seen


def assert_same_state(made: object, given: object) -> None:
    """The types and attributes agree, at any depth."""
    if isinstance(given, ViewMetaSequence):
        assert isinstance(made, ViewMetaSequence)
        assert [each.as_tuple() for each in made.sequence] == [each.as_tuple() for each in given.sequence]
        assert [type(each) for each in made.sequence] == [type(each) for each in given.sequence]
    elif is_dataclass(given) and not isinstance(given, type):
        assert type(made) is type(given)
        assert vars(made).keys() == vars(given).keys()
        for name, value in vars(given).items():
            assert_same_state(vars(made)[name], value)
    elif isinstance(given, (list, tuple)):
        assert isinstance(made, (list, tuple)) and len(made) == len(given)
        for one, other in zip(made, given, strict=True):
            assert_same_state(one, other)
    else:
        assert made == given and isinstance(given, type(made))


def inference(x: Tensor) -> Tensor:
    return x.sin().t()


@pytest.mark.parametrize(
    ("function", "make", "dynamic"),
    [
        (waves, lambda: [leaf(4, 3)], None),
        (waves, lambda: [leaf(4, 3)], True),
        (mutated_views, lambda: [leaf(4, 3), torch.randn(4, 3)], None),
        (inference, lambda: [torch.randn(2, 3)], None),
    ],
)
def test_an_equal_result_is_made_of_the_data(
    function: Callable[..., object], make: Callable[[], list[Tensor]], dynamic: bool | None, results: list[Any]
) -> None:
    run(function, make(), dynamic=dynamic)
    (result,) = results
    entry = read(write(described(result), KINDS), KINDS)
    assert isinstance(entry, Traced)
    made = result_of(
        entry, CompiledRegion(result.compiled_fw, result.compiled_bw, lambda: pytest.fail("not asked for"))
    )
    for part in fields(result):
        if part.name not in (*traced._DROPPED, "dispatch_wrappers", "guards_expr"):
            assert_same_state(getattr(made, part.name), getattr(result, part.name))


@pytest.mark.parametrize("value", [object(), len, lambda: 0, torch.ones(2), slice(3), b"bytes", Path, torch.Generator])
def test_what_is_not_listed_is_refused(value: object, results: list[Any]) -> None:
    run(waves, (leaf(4, 3),))
    (result,) = results
    metadata = replace(result.runtime_metadata, static_input_indices=[value])
    with pytest.raises(Unwritten):
        described(replace(result, runtime_metadata=metadata))
    with pytest.raises(Unwritten):
        described(replace(result, maybe_subclass_meta=value))
    with pytest.raises(Unwritten):
        described(replace(result, dispatch_wrappers=[value]))


@pytest.mark.parametrize(
    "state",
    [
        *(traced.State("Popen", {}), traced.Member("OutputType", "mro"), traced.Member("Popen", "x")),
        *(traced.TypeName("Popen"), traced.Views((("_unsafe_view_ViewMeta", ()),)), traced.Views((("ViewMeta", ()),))),
    ],
)
def test_nothing_is_made_that_is_not_listed(state: object, results: list[Any]) -> None:
    run(waves, (leaf(4, 3),))
    (result,) = results
    entry = described(result)
    entry.metadata.attributes["static_input_indices"] = [state]
    with pytest.raises(KeyError):
        result_of(entry, CompiledRegion(result.compiled_fw, None, lambda: pytest.fail("not asked for")))


def test_compiled_autograd_gets_the_graph_of_backward_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[str] = []

    def watched(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    run(waves, (leaf(4, 3),))
    no_tracing(monkeypatch)
    torch._dynamo.reset()
    x = leaf(4, 3)
    loss = torch.compile(waves, backend=Backend(Options.read(None, {"strict": True})))(x).sum()
    with compiled_autograd._enable(watched):
        loss.backward()
    assert "aten.cos.default" in targets
    torch.testing.assert_close(x.grad, x.sin().exp() * x.cos())


def test_folders_of_another_user_are_named_in_the_report(cache: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    x = leaf(4, 3)
    first, _, _ = run(torch.sigmoid, (x,))
    traces = cache.parent / "regions"
    for folder in (traces, cache):
        os.chown(folder, 12345, -1)
    second, reported, _ = run(torch.sigmoid, (x,))
    assert all(map(torch.equal, first, second))
    assert all(
        re.fullmatch(r"not (taken from|kept in) the cache: .* belongs to another user", each) for each in reported
    )
    assert any(str(traces) in each for each in reported) and any(str(cache) in each for each in reported)


def test_no_parameter_buffer_or_input_is_stored(cache: Path) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))
            self.register_buffer("offset", torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.weight) * torch.tensor([3.0, 5.0, 7.0, 9.0]) + self.offset

    layer, x = Layer(), leaf(3, 4)
    torch._dynamo.reset()
    torch.compile(layer, backend=Backend(Options.read(None, {"strict": True})))(x).sum().backward()
    texts = [get(path.name, folder) or "" for folder in ("graphs", "regions") for path in kept(folder)]
    assert len(texts) == 3

    def stored(tensor: Tensor) -> bool:
        data = bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())
        return any(base64.b64encode(data).decode() in text for text in texts)

    assert stored(torch.tensor([3.0, 5.0, 7.0, 9.0]))
    assert not any(map(stored, (layer.weight, layer.offset, x)))
