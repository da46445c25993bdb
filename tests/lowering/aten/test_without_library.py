"""Convolutions and attention from views, products and maps equal the library's, in numbers and in layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from fusion.lowering.aten.without_library import attention_for_cpu, convolution

aten = torch.ops.aten


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, check_stride=True)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_convolutions_of_images(groups: int, dilation: int) -> None:
    x, w, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 4, 9, 11), (6, 4 // groups, 3, 2), (6,)))
    for stride, padding in itertools.product((1, 2), (0, 2)):
        settings = [stride, stride], [padding, 1], [dilation, 1], False, [0, 0], groups
        for image in (x, x.contiguous(memory_format=torch.channels_last)):
            assert_equal(convolution(image, w, b, *settings), aten.convolution(image, w, b, *settings))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_transposed_convolutions(groups: int, stride: int) -> None:
    x, w = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 4, 9, 11), (4, 6 // groups, 3, 2)))
    for padding, dilation in itertools.product((0, 2), (1, 2)):
        settings = [stride, 1], [padding, 1], [dilation, 1], True, [stride - 1, 0], groups
        assert_equal(convolution(x, w, None, *settings), aten.convolution(x, w, None, *settings))


def test_convolutions_of_rows_and_volumes() -> None:
    row, volume = torch.randn(2, 4, 9, dtype=torch.float64), torch.randn(1, 4, 5, 6, 7, dtype=torch.float64)
    for x, shape, settings in (
        (row, (6, 4, 3), ([2], [1], [2], False, [0], 1)),
        (volume, (6, 2, 3, 2, 1), ([2, 1, 2], [1, 0, 1], [1, 2, 1], False, [0, 0, 0], 2)),
        (volume, (4, 3, 3, 2, 1), ([2], [0], [1], True, [1], 1)),
    ):
        w = torch.randn(*shape, dtype=torch.float64)
        assert_equal(convolution(x, w, None, *settings), aten.convolution(x, w, None, *settings))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("call", ["plain", "causal", "mask", "scale"])
def test_attention(call: str, transposed: bool) -> None:
    q, k, v = (torch.randn(2, 3, rows, 8, dtype=torch.float64) for rows in (5, 7, 7))
    q = q.transpose(1, 2).contiguous().transpose(1, 2) if transposed else q
    masks = {"attn_mask": torch.randn(2, 1, 5, 7, dtype=torch.float64)}
    options = {"plain": {}, "causal": {"is_causal": True}, "mask": masks, "scale": {"scale": 0.3}}[call]
    expected = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)
    for one, other in zip(attention_for_cpu(q, k, v, **options), expected, strict=True):
        assert_equal(one, other)
