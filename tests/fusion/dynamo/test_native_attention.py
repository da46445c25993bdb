"""PyTorch's native calls of transformers in inference: taken apart, so that what is around them can be fused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusion
from tests.fusion.agreement import STRICT

NATIVE = {"aten._transformer_encoder_layer_fwd.default", "aten._native_multi_head_attention.default"}


class Attended(nn.Module):
    """Attention of a module over its input, with what `of` makes of the results."""

    def __init__(self, of: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.attention, self.of = nn.MultiheadAttention(36, 4, batch_first=True), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.attention, x)


def calls_left_by(module: nn.Module, *inputs: Tensor) -> set[str]:
    """Compare a fused module with eager in float64, and return the calls left to the library."""
    module.eval()
    with torch.no_grad():
        explanation = fusion.explain(module)(*inputs)
        result, eager = fusion.fuse(module, options=STRICT)(*inputs), module(*inputs)
        exact = copy.deepcopy(module).double()(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert (result - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6
    assert explanation.kernels or NATIVE & {call.name for call in explanation.externs}
    return {call.name for call in explanation.externs}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layers_are_taken_apart(activation: str, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(36, 4, 70, 0.1, activation, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert not NATIVE & calls_left_by(encoder, torch.randn(3, 11, 36))


def test_what_is_read_of_a_layer_is_an_element() -> None:
    layer = nn.TransformerEncoderLayer(36, 4, 70, batch_first=True)
    first = nn.Sequential(layer, Attended(lambda module, x: x[0]))
    assert not NATIVE & calls_left_by(first, torch.randn(3, 11, 36))


PROGRAMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "of itself": lambda attend, x: attend(x, x, x, need_weights=False)[0],
    "of another": lambda attend, x: attend(x, x + 1, x * 2, need_weights=False)[0],
    "of another with weights": lambda attend, x: attend(x[:, :5], x, x)[0] + 1,
    "weights": lambda attend, x: attend(x, x, x)[1] * 2,
    "weights of each head": lambda attend, x: attend(x, x, x, average_attn_weights=False)[1],
    "both": lambda attend, x: torch.cat([part.flatten() for part in attend(x, x, x)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_attention_is_taken_apart(name: str) -> None:
    assert not NATIVE & calls_left_by(Attended(PROGRAMS[name]), torch.randn(3, 11, 36))


def test_masks_are_the_library_s() -> None:
    layer = nn.TransformerEncoderLayer(36, 4, 70, batch_first=True)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            result: Tensor = self.layer(x, src_key_padding_mask=hidden)
            return result

    hidden = torch.arange(11) >= torch.tensor([[4], [9], [11]])
    assert NATIVE & calls_left_by(Masked(), torch.randn(3, 11, 36), hidden)


def test_strict_numerics_leave_the_calls() -> None:
    layer = nn.TransformerEncoderLayer(36, 4, 70, batch_first=True).eval()
    x = torch.randn(3, 11, 36)
    with torch.no_grad():
        fused = fusion.fuse(layer, options={"numerics": "strict"})
        assert torch.equal(fused(x), layer(x))
        assert NATIVE & {call.name for call in fusion.report(fused).externs}


def test_with_symbolic_sizes() -> None:
    layer = nn.TransformerEncoderLayer(36, 4, 70, batch_first=True).eval()
    with torch.no_grad():
        fused = fusion.fuse(layer, dynamic=True, options=STRICT)
        for rows, length in ((3, 11), (2, 5)):
            x = torch.randn(rows, length, 36)
            torch.testing.assert_close(fused(x), layer(x), rtol=1e-4, atol=1e-5)
        assert fusion.report(fused).kernels
        assert not NATIVE & {call.name for call in fusion.report(fused).externs}
