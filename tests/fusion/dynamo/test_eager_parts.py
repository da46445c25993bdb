"""Operations that PyTorch cannot trace run eagerly; the graphs before and after them are compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fusion
from fusion.calls.fallback import warn_once
from fusion.dynamo.eager_parts import compile_in_parts
from fusion.dynamo.untraceable import untraceable
from tests.fusion.agreement import compare, differentiate, error, gradients

Inputs = tuple[Tensor, ...]
Program = Callable[..., object]


@torch.library.custom_op("fusion_parts::grouped", mutates_args=())
def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows up to `ends[k]` are multiplied by `w[k]`."""
    rows = x.tensor_split(ends[:-1])
    return torch.cat([row @ each for row, each in zip(rows, w, strict=True)])


@grouped.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _reads_numbers(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, w, ends = ctx.saved_tensors
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    xs, grads = x.split(sizes), grad.split(sizes)
    of_x = torch.cat([g @ each.t() for g, each in zip(grads, w, strict=True)])
    return of_x, torch.stack([row.t() @ g for row, g in zip(xs, grads, strict=True)]), None


grouped.register_autograd(_reads_numbers, setup_context=_keep)


def written(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = torch.tanh(x @ w) * 2
    y[x > 0] = v.sigmoid()
    return torch.relu(y @ w).sin()


def experts(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    h = torch.tanh(x) * 2
    h = torch.relu(grouped(h, w, ends)) + 1
    return grouped(h, w, ends).sigmoid() * 3


def counted(x: Tensor, n: Tensor) -> Tensor:
    places = torch.arange(n, device=x.device)
    return torch.tanh(x) * 2 + (places * 0.5).sum().cos()


def all_kinds(x: Tensor, w: Tensor, v: Tensor, ends: Tensor, n: Tensor) -> Tensor:
    y = written(x, w[0], v)
    y = grouped(y, w, ends).exp()
    return y / (1 + torch.arange(n).sum()).sqrt()


def of_written(rows: int) -> Inputs:
    x = torch.randn(rows, 8)
    return x, torch.randn(8, 8), torch.randn(int((x > 0).sum()))


def of_experts(rows: int) -> Inputs:
    return torch.randn(rows, 8), torch.randn(3, 8, 8) / 3, torch.tensor([1, rows // 2, rows])


def of_counted(rows: int) -> Inputs:
    return torch.randn(rows, 8), torch.tensor(rows)


def of_all(rows: int) -> Inputs:
    x, _, v = of_written(rows)
    return x, torch.randn(3, 8, 8) / 3, v, torch.tensor([2, 3, rows]), torch.tensor(rows)


PROGRAMS = {
    "written": (written, of_written, 1),
    "experts": (experts, of_experts, 2),
    "counted": (counted, of_counted, 1),
    "all": (all_kinds, of_all, 3),
}


def trained(f: Program, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """Return the result, and the gradients of the inputs that require them."""
    given = [t.to(dtype, copy=True).requires_grad_() if t.is_floating_point() else t.clone() for t in inputs]
    result = f(*given)
    assert isinstance(result, Tensor)
    (result * torch.linspace(-1, 1, result.numel(), dtype=dtype).view(result.shape)).sum().backward()
    return [result.detach(), *(t.grad for t in given if t.grad is not None)]


def quietly(f: Program, *args: object) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return f(*args)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_as_near_as_eager(name: str, dynamic: bool | None) -> None:
    program, make, alone = PROGRAMS[name]
    fused = fusion.fuse(program, dynamic=dynamic)
    known = len(fusion.report(fused).graphs)  # those of the same function under other settings
    for rows in (10, 13, 7, 10):
        inputs = make(rows)
        got = quietly(trained, fused, inputs, torch.float32)
        eager, exact = trained(program, inputs, torch.float32), trained(program, inputs, torch.float64)
        assert len(got) == len(eager)
        for mine, yours, right in zip(got, eager, exact, strict=True):
            assert (mine.shape, mine.stride()) == (yours.shape, yours.stride())
            assert error(mine, right) <= 2 * error(yours, right) + 1e-6 * float(right.abs().max())
    graphs = fusion.report(fused).graphs[known:]
    assert not any(graph.failure for graph in graphs)
    apart = [graph for graph in graphs if graph.label == "captured"]
    assert all(len(graph.externs) == alone for graph in apart)
    assert sum(len(graph.kernels) for graph in graphs) > alone * len(apart)
    assert len(apart) == 1 or not dynamic, "it was compiled again"


def test_the_report_and_a_warning_name_each_operation_and_its_line() -> None:
    fused = fusion.fuse(lambda *args: experts(*args))
    warn_once.cache_clear()
    with pytest.warns(fusion.FusionWarning, match=r"running eagerly: grouped.* \((test_eager_parts.py:\d+(, )?){2}"):
        trained(fused, of_experts(9), torch.float32)
    first, *others = fusion.report(fused).graphs
    assert [(extern.name, extern.origin.line.partition(":")[0]) for extern in first.externs] == [
        ("grouped.default", "test_eager_parts.py")
    ] * 2
    assert all("DataDependentOutputException" in extern.reason for extern in first.externs)
    assert "in parts" in str(first)
    assert [graph.label for graph in others] == ["forward"] * 3 + ["backward"] * 3
    lines = {origin.line for graph in others for kernel in graph.kernels for origin in kernel.origins}
    assert all(line.startswith("test_eager_parts.py:") for line in lines)


def views(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Views are created before a write, and written after it."""
    y = x * 2
    turned, rest = y.t(), y[1:]
    y[x > 0] = v.exp()
    rest.mul_(3)
    turned.add_(1)
    return y.sin() + 1, rest, turned


def changed(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """An input is changed before and after."""
    x.mul_(2)
    y = x + 1
    y[x > 0] = v
    x.add_(1)
    return y * 2, x.t()


def without_gradients(x: Tensor, v: Tensor) -> Tensor:
    """One of the two writes, and the operations between them, run without gradients."""
    y = x.cos()
    torch.set_grad_enabled(False)
    z = torch.zeros_like(y)
    z[x > 0] = v
    z = z * y + 1
    torch.set_grad_enabled(True)
    y[x > 0] = v * 2
    return (y * z).exp()


def within_no_grad(x: Tensor, v: Tensor) -> Tensor:
    y = x.cos()
    with torch.no_grad():
        z = torch.zeros_like(y)
        z[x > 0] = v
        z = z * 2
    y[x > 0] = v
    return y @ z.t()


def under_autocast(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    y = x.cos() / 8
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = y @ y.t() @ y
        y[x > 0] = v.bfloat16() / 8
        z = y @ y.t()
    return y, z, x @ x.t()


def of_several(x: Tensor, v: Tensor) -> tuple[object, ...]:
    """Parts pass lists, numbers and the same tensor twice to each other."""
    a, b = x.cos().split(4, 1)
    y = x.sin()
    y[x > 0] = v
    c = torch.cat([b, a], 1) + y
    values, places = c.topk(2)
    z = y + 1
    z[x < 0] = values.sum()
    return values + z.sum(), places, y, y, y.shape[0] * x.shape[1]


def branching(x: Tensor, v: Tensor) -> Tensor:
    """Graphs that one part calls stay with it."""
    y = x.cos()
    y[x > 0] = v
    y = torch.cond(y.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos() + 1, (y,))
    y[x > 0] = v * 3
    return y.tanh()


def scaled(x: Tensor, v: Tensor, by: float) -> Tensor:
    y = x.cos() * by
    y[x > 0] = v * by
    return y * (by + 1)


SEEN = (views, changed, without_gradients, within_no_grad, under_autocast, of_several, branching, scaled)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", SEEN)
def test_effects_on_the_caller_agree_with_eager(program: Program, dynamic: bool | None) -> None:
    fused = fusion.fuse(program, dynamic=dynamic)
    for rows in (8, 6):
        x = torch.randn(rows, 8)
        others = torch.randn(int((x > 0).sum())), *([rows / 5] if program is scaled else [])

        def called(f: Program, x: Tensor = x, others: tuple[object, ...] = others) -> object:
            leaves = [t.clone().requires_grad_() if isinstance(t, Tensor) else t for t in (x, *others)]
            given = [t * 1 if isinstance(t, Tensor) else t for t in leaves]
            results = quietly(f, *given)
            differentiate(results)
            return results, given, gradients(leaves)

        near = 2e-2 if program is under_autocast else None
        compare(called(program), called(fused), rtol=near, atol=near)
    assert "in parts" in str(fusion.report(fused))


def test_a_checkpoint_draws_the_numbers_of_forward_in_backward() -> None:
    def part(x: Tensor, v: Tensor) -> Tensor:
        y = nn.functional.dropout(x, 0.5).cos()
        y[x > 0] = v * 2
        return y.sin()

    def f(x: Tensor, v: Tensor) -> Tensor:
        return checkpoint(part, x * 2, v, use_reentrant=False).exp() * 2

    x, v = of_written(8)[::2]
    results = []
    for each in (f, fusion.fuse(f)):
        torch.manual_seed(0)
        results.append(quietly(trained, each, (x, v), torch.float32))
    torch.testing.assert_close(*results)


def test_views_alone_are_not_compiled() -> None:
    def f(x: Tensor, v: Tensor) -> Tensor:
        y, mask = x.cos(), x > 0
        y[mask] = v
        turned, other = y.t(), mask.t()
        turned[other] = v
        return y.view(-1).sin()

    fused = fusion.fuse(f)
    x, v = of_written(8)[::2]
    torch.testing.assert_close(quietly(trained, fused, (x, v), torch.float32), trained(f, (x, v), torch.float32))
    labels = [graph.label for graph in fusion.report(fused).graphs]
    assert labels == ["captured", "forward", "forward", "backward", "backward"]


def test_within_a_transformation_all_runs_eagerly() -> None:
    def f(x: Tensor, v: Tensor) -> Tensor:
        y = x.cos()
        y[x > 0] = v
        return torch.vmap(lambda row: row.sin() * 2)(y)

    fused = fusion.fuse(f)
    x, v = of_written(8)[::2]
    torch.testing.assert_close(quietly(trained, fused, (x, v), torch.float32), trained(f, (x, v), torch.float32))
    assert all(graph.failure for graph in fusion.report(fused).graphs)


def test_a_defect_of_the_parts_leaves_all_to_eager_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("fusion.compilation.region.compile_in_parts", fails)
    fused = fusion.fuse(lambda *given: written(*given) * 3)
    with pytest.warns(fusion.FusionWarning, match="a defect"):
        fused(*(t.requires_grad_() for t in of_written(8)))
    assert "a defect" in fusion.report(fused).graphs[0].failure


def test_gradients_are_turned_on_and_off_between_parts() -> None:
    """Dynamo of PyTorch 2.11 leaves them off after a part that turns them on."""
    parts: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        return compile_in_parts(graph, untraceable(graph), lambda part: parts.append(part) or part).forward

    x, v = of_written(8)[::2]
    result = torch.compile(within_no_grad, backend=backend)(x.requires_grad_(), v.requires_grad_())
    assert result.requires_grad and torch.is_grad_enabled()
    assert len(parts) == 5 and not any("_set_grad_enabled" in part.code for part in parts)


@torch.library.custom_op("fusion_parts::refused", mutates_args=())
def refused(x: Tensor) -> Tensor:
    raise ValueError("refused")


refused.register_fake(torch.empty_like)


@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "as a whole"])
def test_gradients_are_on_after_an_error_without_them(whole: bool) -> None:
    def f(x: Tensor, v: Tensor) -> Tensor:
        y = torch.vmap(lambda row: row.cos())(x) if whole else x.cos()
        with torch.no_grad():
            z = torch.zeros_like(y)
            z[x > 0] = v
            z = refused(z)
        y[x > 0] = v
        return y @ z

    with pytest.raises(ValueError, match="refused"):
        quietly(trained, fusion.fuse(f), of_written(8)[::2], torch.float32)
    assert torch.is_grad_enabled()


def test_strict_raises() -> None:
    with pytest.raises(Exception, match="nonzero"):
        trained(fusion.fuse(written, options={"strict": True}), of_written(8), torch.float32)
