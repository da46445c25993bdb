"""Means that are subtracted from their rows: summed from the first element on, and then exact of equal numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusion
from tests.fusion.agreement import assert_as_eager

pytestmark = pytest.mark.usefixtures("without_disassembly")


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def residual(x: Tensor) -> tuple[Tensor, Tensor]:
    result = x * 0.75 + 3
    return result, layer_norm(result)


def by_hand(x: Tensor) -> Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + 1e-5)


def third_moment(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).pow(3).mean(-1)


def behind_a_product(x: Tensor) -> Tensor:
    return layer_norm(x @ torch.eye(x.shape[-1], dtype=x.dtype))


def group_norm(x: Tensor) -> Tensor:
    return F.group_norm(x.view(2, 4, -1), 2)


CENTRED = (layer_norm, residual, by_hand, third_moment, behind_a_product, group_norm)


def kernels(function: Callable[..., object], *args: Tensor, target: str = "reference") -> list[str]:
    explanation = fusion.explain(function, options={"target": target, "strict": True})(*args)
    return [kernel.source for kernel in explanation.kernels]


def has_pivot(text: str) -> bool:
    """Is the first sum over differences from an operand that does not vary along it?"""
    names = dict(re.findall(r"^  (%\d+) = (.*)$", text, re.MULTILINE))
    match = re.search(r"sum0 = sum over (.*) of %\d+ - (.*)$", text, re.MULTILINE)
    return match is not None and not any(axis in names.get(match[2], match[2]) for axis in match[1].split())


@pytest.mark.parametrize("target", ["reference", "c"])
@pytest.mark.parametrize("columns", [64, 1023])
@pytest.mark.parametrize("function", CENTRED)
def test_deviations_of_equal_numbers_are_zero(function: Callable[[Tensor], object], columns: int, target: str) -> None:
    x = torch.tensor([98765.43, -0.1]).repeat_interleave(4)[:, None].expand(8, columns).contiguous()
    result = fusion.fuse(function, options={"target": target, "strict": True})(x)
    apart = result[1] if isinstance(result, tuple) else result
    assert isinstance(apart, Tensor) and not apart.any()


@pytest.mark.parametrize("target", ["reference", "c"])
def test_deviations_of_equal_numbers_are_zero_in_rows_of_symbolic_length(target: str) -> None:
    fused = fusion.fuse(lambda x: layer_norm(x), dynamic=True, options={"target": target, "strict": True})
    for columns in (33, 50, 1023):
        assert not fused(torch.full((3, columns), 0.7317)).any()
    assert len(fusion.report(fused).graphs) == 1


def test_rows_that_may_be_empty_have_no_first_element() -> None:
    def norm(x: Tensor, mask: Tensor) -> Tensor:
        return by_hand(x.masked_select(mask))

    x = torch.randn(40)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fused = fusion.fuse(norm, dynamic=True, options={"target": "reference", "strict": True})
        assert fused(x, x > 9).shape == (0,)
    ((kernel,),) = (graph.kernels for graph in fusion.report(fused).graphs)
    assert "sum1" in kernel.source and "in0[0]" not in kernel.source


@pytest.mark.parametrize("target", ["reference", "c"])
@pytest.mark.parametrize("function", CENTRED)
def test_rows_around_any_mean_are_as_near_as_eager(function: Callable[[Tensor], object], target: str) -> None:
    fused = fusion.fuse(function, options={"target": target, "strict": True})
    for about in (0.0, 30.0, -1e4):
        x = torch.randn(8, 1200, generator=torch.Generator().manual_seed(0)) + about
        assert_as_eager(fused(x), function(x), function(x.double()))


@pytest.mark.parametrize("target", ["reference", "c"])
def test_a_distant_first_element_costs_at_most_one_unit_in_its_last_place(target: str) -> None:
    x = torch.randn(8, 1200, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 1e3
    exact = layer_norm(x.double())
    result = fusion.fuse(layer_norm, options={"target": target, "strict": True})(x)
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=2 * torch.finfo(x.dtype).eps * exact.max().item())


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 3, 39])
def test_numbers_that_are_not_finite_propagate(special: float, place: int) -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    x[1, place] = special
    torch.testing.assert_close(fusion.fuse(layer_norm)(x), layer_norm(x), equal_nan=True)


@pytest.mark.parametrize("function", CENTRED)
def test_the_pivot_is_loaded_from_the_row(function: Callable[[Tensor], object]) -> None:
    assert any(has_pivot(text) for text in kernels(function, torch.randn(8, 1200)))


def norm_as_the_last_reader(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The product is last read by the norm, whose mean is stored, too."""
    result = x @ w
    norm, mean, factor = torch.native_layer_norm(result + result.amax(0) * y, result.shape[-1:], None, None, 1e-5)
    return norm, mean, factor


def test_a_row_whose_first_element_is_read_by_all_of_it_is_not_written_over() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, y = (torch.randn(*sizes, generator=generator) + 1 for sizes in ((256, 64), (64, 192), (256, 192)))
    exact = norm_as_the_last_reader(x.double(), w.double(), y.double())
    for target in ("reference", "c"):
        fused = fusion.fuse(norm_as_the_last_reader, options={"target": target, "strict": True})
        for mine, theirs, truth in zip(fused(x, w, y), norm_as_the_last_reader(x, w, y), exact, strict=True):
            assert_as_eager(mine, theirs, truth)
    (text,) = (text for text in kernels(norm_as_the_last_reader, x, w, y) if "rsqrt" in text)
    assert "in0[192*i0 + r0] - in0[192*i0]\n" in text and "store in0" not in text


def test_on_a_gpu_the_mean_that_is_stored_is_that_of_the_row() -> None:
    """It is stored after the norm; a recomputation would read the first element of the normalised row."""
    pytest.importorskip("triton")
    given = (torch.empty(sizes, device="meta") for sizes in ((256, 300), (300, 192), (256, 192)))
    result = fusion.export_kernels(norm_as_the_last_reader, *given, target="triton", arch="sm_90")
    (text,) = (kernel.source for kernel in result.kernels if "tl.rsqrt" in kernel.source)
    stores = text.index("tl.store")
    assert "tl.load" not in text[stores:]


def of_a_costly_row(x: Tensor) -> Tensor:
    return layer_norm(F.gelu(x))


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def sum_and_deviations(x: Tensor) -> tuple[Tensor, Tensor]:
    total = x.sum(-1, keepdim=True)
    return total, (x - total / x.shape[-1]).square().sum(-1)


def variance(x: Tensor) -> Tensor:
    return x.var(-1)


def of_a_softmax(x: Tensor) -> Tensor:
    return layer_norm(x.softmax(-1))


@pytest.mark.parametrize("function", [mean, sum_and_deviations, of_a_softmax, of_a_costly_row, variance])
def test_other_sums_have_no_pivot(function: Callable[..., object]) -> None:
    """No deviations; a stored sum; an operand from another fold; a costly operand; a corrected mean."""
    assert not any(has_pivot(text) for text in kernels(function, torch.randn(8, 1200)))
