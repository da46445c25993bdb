"""Guards on sizes: what PyTorch prints is evaluated, everything else is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion.backend import Backend
from fusion.graph_cache.serialise import Unwritten
from fusion.graph_cache.size_guards import holds, parsed
from fusion.options import Options

A, B = "L['t0']", "L['t1']"


@pytest.mark.parametrize(
    "text",
    [
        f"2 <= {A} and {A} <= 12",
        f"2 <= {A} < 8 <= {B} != 9",
        f"{A} % 2 == 0 or not {B} > 3",
        f"-{A} + {B} * 3 - 1 == 5",
        f"({A} + 1) // 2 == max({B}, 3) and min({A}, {B}, 4) < 4",
        f"math.floor({A} / 2) == 3 and math.ceil({A} / 4) == 2 and math.trunc({A} / {B}) > 1",
        f"torch.sym_float({A}) / 2 == 3.0 // 1".replace("3.0 // 1", "3"),
        f"{A} ** 2 == 36",
        "True",
    ],
)
def test_guards_are_evaluated_as_python_does(text: str) -> None:
    for sizes in ([6, 2], [6, 3], [12, 9], [1, 1], [5, 8]):
        names = {"L": {f"t{k}": size for k, size in enumerate(sizes)}, "torch": torch, "math": __import__("math")}
        assert holds(parsed(text), sizes) is bool(eval(text, names))


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('x')", "open('x')", "max.__call__(1)", "torch.load('x')", "math.__name__ == 'x'"),
        *("[1][0]", "L['t0'].x", "L['x']", "L[0]", "M['t0']", "'x' == 'x'", "1.5 < 2", "(lambda: 1)()", "max(*L)"),
        *("max(1, 2, key=abs)", f"{A} if {A} else {A}", f"{A} is {A}", f"{A} & 1", f"~{A}", "(x := 1)", "b''", "None"),
        *("1 +", "(" * 500 + ")" * 500, f"{A}\x00", ""),
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(Unwritten):
        parsed(text)


def test_a_guard_restricts_symbolic_sizes() -> None:
    seen: list[object] = []

    def limited(x: Tensor) -> Tensor:
        return x.sin() if x.shape[0] > 3 else x.cos()

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        (size,) = (each for each in inputs if isinstance(each, torch.SymInt))
        before = len(size.node.shape_env.guards)
        assert holds(parsed(f"{A} < 100"), [size])
        seen.append(len(size.node.shape_env.guards) - before)
        return graph

    torch.compile(limited, backend=backend, dynamic=True)(torch.ones(5))  # type: ignore[arg-type]
    assert seen == [1]


def test_pytorchs_evaluation_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> object:
        raise AssertionError("a text was evaluated")

    def of_sizes(x: Tensor) -> Tensor:
        return x.exp() / x.shape[0] if x.shape[1] > 3 else x.sin()

    notes: list[str] = []
    monkeypatch.setattr("torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression", fail)
    monkeypatch.setattr("pickle.loads", fail)
    for _ in range(2):
        torch._dynamo.reset()
        backend = Backend(Options.read(None, {"strict": True}))
        torch.compile(of_sizes, backend=backend, dynamic=True)(torch.ones(5, 7, requires_grad=True)).sum().backward()
        notes = [note for report in backend.reports for note in report.notes]
    assert notes == ["from the cache"] * 2
