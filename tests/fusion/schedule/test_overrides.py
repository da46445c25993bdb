"""Overrides: each imposed decision is taken, results stay right, and without any nothing changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.inspect.report import Report
from fusion.schedule.overrides import LIBRARY, ONE_KERNEL, OPERANDS_STORED, PRICED, Overrides


def compiled(
    program: Callable[..., object], overrides: Overrides, *inputs: Tensor, **options: object
) -> tuple[Sequence[Report], object]:
    torch._dynamo.reset()
    backend = fusion.Backend(fusion.Options.read(options={"strict": True, **options}), overrides=overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        result = torch.compile(program, backend=backend, dynamic=False)(*inputs)
    return backend.reports, result


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(F.gelu(F.linear(x, w, b)), -1)


def layer_inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in ((96, 80), (72, 80), (72,))]


IMPOSED = (
    Overrides(fused=False),
    Overrides(products=LIBRARY),
    Overrides(products=ONE_KERNEL),
    Overrides(products=OPERANDS_STORED),
    Overrides(products=ONE_KERNEL, fused=False),
    Overrides(attention=True),
    Overrides(attention=False),
)


@pytest.mark.parametrize("target", ["c", "reference"])
@pytest.mark.parametrize("overrides", IMPOSED, ids=str)
def test_results_are_right_whatever_is_imposed(overrides: Overrides, target: str) -> None:
    inputs = layer_inputs()
    _, result = compiled(layer, overrides, *inputs, target=target)
    torch.testing.assert_close(result, layer(*inputs))


@pytest.mark.parametrize("target", ["c", "reference"])
def test_products_are_where_they_are_imposed(target: str) -> None:
    inputs = layer_inputs()
    (library,), _ = compiled(layer, Overrides(products=LIBRARY), *inputs, target=target)
    assert any("mm" in extern.name for extern in library.externs)
    (generated,), _ = compiled(layer, Overrides(products=ONE_KERNEL), *inputs, target=target)
    assert not generated.externs and any("addmm" in kernel.name for kernel in generated.kernels)
    (choice,) = [tuning for tuning in generated.tunings if len(tuning.trials) > 1]
    assert choice.trials[choice.chosen].name == ONE_KERNEL


def test_operands_are_stored_before_where_that_is_imposed() -> None:
    def program(x: Tensor, shift: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        return F.gelu(torch.relu((x - shift) * scale) @ w)

    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((96, 80), (80,), (80,), (80, 72))]
    (together,), _ = compiled(program, Overrides(products=ONE_KERNEL), *inputs, target="reference")
    assert len(together.kernels) == 1
    (stored,), result = compiled(program, Overrides(products=OPERANDS_STORED), *inputs, target="reference")
    first, second = stored.kernels
    assert (first.name, second.name) == ("sub_mul_relu", "matmul_gelu")
    assert not stored.externs
    torch.testing.assert_close(result, program(*inputs))


def test_without_fusion_each_operation_is_a_kernel() -> None:
    def program(x: Tensor) -> Tensor:
        return (torch.softmax(x.sin() * 2, -1) + 1).sum(0)

    x = torch.randn(40, 50, dtype=torch.float64)
    (together,), _ = compiled(program, PRICED, x)
    (apart,), result = compiled(program, Overrides(fused=False), x)
    assert len(apart.kernels) > 5 > len(together.kernels)
    torch.testing.assert_close(result, program(x))


def test_chains_of_products_are_cut_for_the_library() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v

    inputs = [torch.randn(2, 4, 256, 64) for _ in range(3)]
    (chained,), _ = compiled(attention, PRICED, *inputs)
    (apart,), result = compiled(attention, Overrides(products=LIBRARY), *inputs)
    assert not chained.externs and sum("bmm" in extern.name for extern in apart.externs) == 2
    torch.testing.assert_close(result, attention(*inputs))


@pytest.mark.parametrize("generated", [True, False])
def test_attention_is_whose_it_is_imposed_to_be(generated: bool) -> None:
    inputs = [torch.randn(1, 4, 512, 64) for _ in range(3)]
    reports, result = compiled(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        Overrides(attention=generated),
        *inputs,
    )
    called = any("attention" in extern.name for report in reports for extern in report.externs)
    assert called != generated
    torch.testing.assert_close(result, F.scaled_dot_product_attention(*inputs, is_causal=True))


def test_nothing_that_is_imposed_is_kept_in_the_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    inputs = layer_inputs(torch.float32)
    for overrides in (Overrides(fused=False), PRICED, Overrides(fused=False)):
        (report,), _ = compiled(layer, overrides, *inputs, graph_cache=True)
        assert "from the cache" not in report.notes
        assert (len(report.kernels) > 2) == (not overrides.fused)


def test_gradients_under_overrides() -> None:
    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer(x, w, b).square().sum()

    inputs = [each.requires_grad_() for each in layer_inputs()]
    wanted = torch.autograd.grad(loss(*inputs), inputs)
    for overrides in IMPOSED:
        _, result = compiled(loss, overrides, *inputs)
        assert isinstance(result, Tensor)
        torch.testing.assert_close(torch.autograd.grad(result, inputs), wanted)
