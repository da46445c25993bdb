"""Reductions under the interpreter: functions of a kernel combine full tiles, not one element at a time; sums of
integers wrap around.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from fusion.codegen.triton.launch.interpreted import _complete_interpreter


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis", "calls"), [((4096,), 0, 12), ((4, 64), 1, 6), ((4, 64), 0, 2), ((4, 8), None, 5)]
)
def test_neighbours_are_joined(shape: tuple[int, ...], axis: int | None, calls: int, keep_dims: bool) -> None:
    _complete_interpreter()
    results = []

    def join(a: Any, i: Any, b: Any, j: Any) -> tuple[Any, Any]:
        results.append(a.handle.data.shape)
        first = a.handle.data <= b.handle.data
        return tuple(tile(np.where(first, one.handle.data, two.handle.data)) for one, two in ((a, b), (i, j)))

    def tile(data: np.ndarray) -> Any:
        dtype = tl.float32 if data.dtype == np.float32 else tl.int32
        return tl.core.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))

    values = np.random.default_rng(0).permutation(np.prod(shape)).astype(np.float32).reshape(shape)
    places = np.arange(values.size, dtype=np.int32).reshape(shape)
    reduction = interpreter.ReduceOps(axis, SimpleNamespace(fn=join), keep_dims)
    least, place = (actual.handle.data for actual in reduction.generic_reduce((tile(values), tile(places))))
    assert len(results) == calls
    expected = values.min(axis, keepdims=keep_dims)
    np.testing.assert_array_equal(least.reshape(expected.shape), expected)
    np.testing.assert_array_equal(values.reshape(-1)[place].reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sums_of_integers_wrap_around(dtype: type[np.signedinteger[Any]]) -> None:
    _complete_interpreter()
    values, kind = np.full(8, np.iinfo(dtype).max, dtype), {np.int32: tl.int32, np.int64: tl.int64}[dtype]
    tile = tl.core.tensor(interpreter.TensorHandle(values, kind), tl.block_type(kind, [8]))
    assert interpreter.ReduceOps(0, None, False).sum(tile).handle.data.item() == -8
