"""Views in the generated module: one call each, where needed, and views wherever the program can observe it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusion
from fusion.lowering.ir.program import Program
from fusion.runtime import splice

STRICT = {"strict": True}


def code_of(function: Callable[..., object], *args: Tensor, folder: Path) -> str:
    """The modules that run for one call."""
    fusion.fuse(function, options={**STRICT, "dump": folder})(*args)
    return "\n".join(path.read_text() for path in sorted(folder.glob("*/*_module.py")))


def test_a_chain_of_views_is_one_call(tmp_path: Path) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (torch.tanh(x).reshape(-1, 60) @ w.unsqueeze(0).transpose(1, 2).squeeze(0)).view(2, 50, 40)

    x, w = torch.randn(2, 50, 60), torch.randn(40, 60)
    code = code_of(f, x, w, folder=tmp_path)
    calls = re.findall(r"([\w.]+)\(", code.partition("clear()")[2].partition("return")[0])
    assert calls == ["memory_empty", "kernels_tanh", *["memory_in_memory_of"] * 2, "torch.mm", "memory_in_memory_of"]
    torch.testing.assert_close(fusion.fuse(f, options=STRICT)(x, w), f(x, w))


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_inputs_with_a_storage_offset(dynamic: bool) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.t() @ w.unsqueeze(0).expand(3, -1, -1)[1], x.t()

    fused = fusion.fuse(f, dynamic=dynamic, options=STRICT)
    for rows in (4, 7, 9):
        x, w = torch.randn(rows + 2, 11)[1 : rows + 1, 3:9], torch.randn(rows + 1, 5)[1:]
        product, view = fused(x, w)
        torch.testing.assert_close(product, x.t() @ w)
        assert view.data_ptr() == x.data_ptr() and view.stride() == (1, 11)


def test_the_cost_of_a_view_does_not_grow_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of hundreds of views in a model once searched all results."""

    def asked(layers: int) -> int:
        count = 0
        names = Program.output_names

        def counted(program: Program) -> frozenset[str]:
            nonlocal count
            count += sys._getframe(1).f_globals["__name__"] == splice.__name__
            return names(program)

        def f(x: Tensor, w: Tensor) -> Tensor:
            for _ in range(layers):
                x = x @ w.t()
            return x

        torch._dynamo.reset()
        with monkeypatch.context() as context:
            context.setattr(Program, "output_names", counted)
            fusion.fuse(f, options=STRICT)(torch.randn(3, 4), torch.randn(4, 4))
        return count

    assert asked(6) == asked(2) > 0


def test_a_lone_result_is_a_tensor_that_may_be_changed() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().view(2, 6).t()

    x = torch.randn(3, 4, requires_grad=True)
    result = fusion.fuse(f, options=STRICT)(x)
    expected = f(x)
    assert result.stride() == expected.stride() == (1, 6)
    result.mul_(2)
    expected.mul_(2)
    result.sum().backward()  # type: ignore[no-untyped-call]
    ours, x.grad = x.grad, None
    expected.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours, x.grad)


def test_a_change_of_a_saved_tensor_is_noticed() -> None:
    """A view that backward needs shares its count of changes with the tensor that was returned."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.exp()
        return hidden, hidden.view(-1, 4) @ w

    x, w = torch.randn(2, 3, 4), torch.randn(4, 5, requires_grad=True)
    for run in (f, fusion.fuse(f, options=STRICT)):
        hidden, product = run(x, w)
        hidden.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()  # type: ignore[no-untyped-call]


def heads(x: Tensor, w: Tensor) -> Tensor:
    """Queries, keys and values out of one product, of a batch of one: three views that backward needs."""
    parts = (x @ w).tanh().split(32, dim=2)
    query, key, value = (part.view(1, -1, 4, 8).transpose(1, 2) for part in parts)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(1, -1, 32)


def test_tensors_saved_for_backward_alone_are_not_views(tmp_path: Path) -> None:
    x, w = torch.randn(1, 64, 48), torch.randn(48, 96, requires_grad=True)
    code = code_of(heads, x, w, folder=tmp_path)
    result = code.partition("kernels_tanh(")[2].partition("_scaled_dot_product")[0]
    assert re.findall(r"(\w+)\(", result) == ["memory_in_memory_of"] * 3, code
    grads = [torch.autograd.grad(run(x, w).square().sum(), w) for run in (heads, fusion.fuse(heads, options=STRICT))]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_the_saved_result_of_attention_is_not_a_view(tmp_path: Path) -> None:
    """This holds for its result in rows and transposed, after a kernel has read it with the traced strides."""

    def f(q: Tensor, w: Tensor) -> Tensor:
        q = q.transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(-1, 256)
        return attended @ (w * attended.tanh().mean())

    q, w = torch.randn(2, 40, 4, 64), torch.randn(256, 256, requires_grad=True)
    code = code_of(f, q, w, folder=tmp_path)
    assert "_attention" in code and not re.findall(r"torch\.ops\.aten|as_strided", code.partition("as_traced(")[2]), (
        code
    )
    grads = [torch.autograd.grad(run(q, w).square().sum(), w) for run in (f, fusion.fuse(f, options=STRICT))]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_views_of_equal_layout_are_one(tmp_path: Path) -> None:
    def f(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y.view(-1, 200) @ v, y.reshape(600, 200) @ w

    x, v, w = (torch.randn(shape, dtype=torch.float64) for shape in ((20, 30, 200), (200, 250), (200, 260)))
    code = code_of(f, x, v, w, folder=tmp_path)
    assert code.count("torch.mm(") == 2 and code.count("memory_in_memory_of(") == 1, code
    for got, want in zip(fusion.fuse(f, options=STRICT)(x, v, w), f(x, v, w), strict=True):
        torch.testing.assert_close(got, want)


def test_views_of_tensors_without_strides() -> None:
    dense = torch.randn(3, 4).relu()
    fused = fusion.fuse(lambda s, x: s.t() @ (x + 1), options=STRICT)
    x = torch.randn(3, 2)
    torch.testing.assert_close(fused(dense.to_sparse(), x), dense.t() @ (x + 1))


def test_results_of_one_kernel_have_separate_storages() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y.view(-1), y.t(), (x.cos()).view(-1)

    x = torch.randn(3, 4)
    first, second, third = fusion.fuse(f, options=STRICT)(x)
    first.zero_()
    assert not second.any()
    torch.testing.assert_close(third, x.cos().view(-1))


def cut(x: Tensor, w: Tensor) -> Tensor:
    first, second, third = torch.split(x.exp(), [128, 136, 248], dim=1)
    rows = (first @ w[24:152]).sum(0) + (second @ w[-136:]).sum(0) + (third @ w[160:408]).sum(0)
    whole = x.sin()
    parts = torch.split(whole.unsqueeze(0).expand(2, -1, -1).transpose(1, 2)[1], 200)
    for part in parts[:2]:
        rows = rows + (part.t() @ w[:200][:, : w.shape[1]]).sum(0)
    left, right = (x * 2).view(-1, 2, 256).unbind(1)
    return rows + (left @ w[:256]).sum(0) * (right @ w[256:512]).sum(0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_with_an_offset(dynamic: bool, tmp_path: Path) -> None:
    fused = fusion.fuse(cut, dynamic=dynamic, options={**STRICT, "dump": tmp_path})
    for rows in (260, 250):
        x, w = torch.randn(rows, 512, dtype=torch.float64), torch.randn(600, 256, dtype=torch.float64)[5:555]
        torch.testing.assert_close(fused(x, w), cut(x, w))
    code = next(tmp_path.glob("*/*_module.py")).read_text()
    # How many of the products are the library's is a question of their price.
    assert re.search(r"memory_in_memory_of\(\w+, \([^()]*\), \([^()]*\), \d+\)\n +\w+ = torch\.mm\(", code), code
    assert dynamic or "torch.ops.aten" not in code, code


def test_strides_of_a_result_with_a_dimension_of_one_element() -> None:
    """PyTorch's fake tensors say 40 for the first stride of this view, and its calls give 40 · 517 · 2."""

    def f(x: Tensor) -> Tensor:
        return (x * 2).view(2, 517, 1, 1, 40).permute(3, 0, 1, 4, 2).view(1, 2, 517, 40)

    x = torch.randn(2, 517, 40)
    fused = fusion.fuse(f, options=STRICT)(x)
    torch.testing.assert_close(fused, f(x))
    assert fused.stride() == f(x).stride()


def test_a_change_through_a_view_of_an_input() -> None:
    """A library call updates a cache at a position: the tensor's version increases, as in eager."""

    def f(cache: Tensor, x: Tensor) -> Tensor:
        torch.ops.aten.index_put_(cache[1][:, 2:], [torch.tensor([0, 2])], x.sort(1)[0])
        return cache * 2

    fused = fusion.fuse(f, options=STRICT)
    x = torch.randn(2, 3)
    caches = [torch.zeros(20)[4:].view(2, 2, 4)[:, :, :].repeat(1, 2, 1) for _ in range(2)]
    versions = [cache._version for cache in caches]
    torch.testing.assert_close(fused(caches[0], x[:, :2]), f(caches[1], x[:, :2]))
    torch.testing.assert_close(*caches)
    assert [c._version > v for c, v in zip(caches, versions, strict=True)] == [True, True]
