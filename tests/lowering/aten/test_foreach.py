"""Operations on lists of tensors, decomposed, against the operations themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion.lowering.aten.foreach import foreach_decompositions

TABLE = foreach_decompositions()
UNARY = sorted((o for o in TABLE if len(o._schema.arguments) == 1), key=str)

CALLS: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]], tuple[object, ...]]] = {
    "_foreach_add.List": lambda a, b, c: (a, b),
    "_foreach_add.Scalar": lambda a, b, c: (a, 2),
    "_foreach_add.ScalarList": lambda a, b, c: (a, [1.0, 2.0, 3.0]),
    "_foreach_add.Tensor": lambda a, b, c: (a, torch.tensor(2.0)),
    "_foreach_sub.List": lambda a, b, c: (a, b),
    "_foreach_mul.Tensor": lambda a, b, c: (a, torch.tensor(2.0)),
    "_foreach_div.ScalarList": lambda a, b, c: (a, [1.0, 2.0, 3.0]),
    "_foreach_addcmul.Scalar": lambda a, b, c: (a, b, c, 0.5),
    "_foreach_addcmul.ScalarList": lambda a, b, c: (a, b, c, [1.0, 2.0, 3.0]),
    "_foreach_addcdiv.Scalar": lambda a, b, c: (a, b, c),
    "_foreach_addcdiv.ScalarList": lambda a, b, c: (a, b, c, [1.0, 2.0, 3.0]),
    "_foreach_lerp.List": lambda a, b, c: (a, b, c),
    "_foreach_lerp.Scalar": lambda a, b, c: (a, b, 0.9),
    "_foreach_lerp.ScalarList": lambda a, b, c: (a, b, [0.1, 0.2, 0.3]),
    "_foreach_pow.List": lambda a, b, c: (c, a),
    "_foreach_pow.Scalar": lambda a, b, c: (c, 2.5),
    "_foreach_pow.ScalarAndTensor": lambda a, b, c: (0.9, a),
    "_foreach_maximum.Scalar": lambda a, b, c: (a, 0.5),
    "_foreach_maximum.List": lambda a, b, c: (a, b),
    "_foreach_minimum.ScalarList": lambda a, b, c: (a, [0.1, 0.2, 0.3]),
    "_foreach_clamp_min.Scalar": lambda a, b, c: (a, 0.5),
    "_foreach_norm.Scalar": lambda a, b, c: (a, 1),
    "_foreach_copy.default": lambda a, b, c: (a, b),
}


def lists(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Three lists of equal shapes; the last holds nothing near zero."""
    shapes = [(3,), (2, 4), ()]
    first, second, third = ([torch.randn(shape).to(dtype) for shape in shapes] for _ in range(3))
    first[0][0] = float("nan")
    return [first, second, [tensor.abs() + 0.5 for tensor in third]]


def compare(overload: torch._ops.OpOverload, *args: object, **kwargs: object) -> None:
    got, want = TABLE[overload](*args, **kwargs), overload(*args, **kwargs)
    assert isinstance(got, list) and len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_several_lists(name: str, dtype: torch.dtype) -> None:
    stem, _, kind = name.partition(".")
    compare(getattr(getattr(torch.ops.aten, stem), kind), *CALLS[name](*lists(dtype)))


@pytest.mark.parametrize("overload", UNARY, ids=str)
def test_one_list(overload: torch._ops.OpOverload) -> None:
    compare(overload, lists(torch.float32)[2])


def test_keywords() -> None:
    first, second, _ = lists(torch.float32)
    compare(torch.ops.aten._foreach_add.List, first, second, alpha=3)
    compare(torch.ops.aten._foreach_norm.Scalar, first, 2, dtype=torch.float64)
    assert len(UNARY) > 25
