"""Checks that a fused function behaves as eager: values, dtypes, strides, aliasing, mutation."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

import fusion

STRICT = {"strict": True}


def agree(
    f: Callable[..., object],
    *inputs: object,
    calls: int = 1,
    backward: bool = False,
    dynamic: bool | None = None,
    strides: bool = True,
    kernels: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: object,
) -> fusion.Explanation:
    """Run `f` and `fuse(f)` on equal inputs, `calls` times, and compare all effects that a caller can observe.

    Args:
        backward: sum the differentiable outputs and compare the gradients of the inputs as well.
        strides: compare the strides of outputs.
        kernels: were kernels generated?  False for a function that computes nothing (it returns inputs, views of
            them, or nothing), or for which nothing is generated.

    Returns:
        The report of the fused function.
    """
    fused = fusion.fuse(f, dynamic=dynamic, options=STRICT)
    for _ in range(calls):
        mine, yours = copy.deepcopy((inputs, kwargs)), copy.deepcopy((inputs, kwargs))
        expected, got = f(*mine[0], **mine[1]), fused(*yours[0], **yours[1])
        compare((mine, expected), (yours, got), strides=strides, rtol=rtol, atol=atol)
        if backward:
            differentiate(expected)
            differentiate(got)
            compare(gradients(mine), gradients(yours), strides=False, rtol=rtol, atol=atol)
    report = fusion.report(fused)
    assert bool(report.kernels) == kernels, f"{len(report.kernels)} kernels were generated\n{report}"
    return report


def compare(
    expected: object, got: object, *, strides: bool = True, rtol: float | None = None, atol: float | None = None
) -> None:
    """Equal trees of equal leaves; tensors with the same metadata, that share memory with one another in the same way.

    A leaf that is the same object as an earlier one must be so in both trees.
    """
    leaves, structure = pytree.tree_flatten(expected)
    other, structure_other = pytree.tree_flatten(got)
    assert structure == structure_other
    for a, b in zip(leaves, other, strict=True):
        assert type(a) is type(b), (a, b)
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, b.device, b.requires_grad)
            assert not strides or _strides(a) == _strides(b), f"strides {a.stride()}, fused {b.stride()}"
            torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert a == b
    assert _identities(leaves) == _identities(other), "other leaves are the same object"
    assert _sharing(leaves) == _sharing(other), "other leaves share memory"


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest absolute difference from float64, equal infinities and NaNs counting as none."""
    result, exact = result.double(), exact.double()
    same = (result == exact) | (result.isnan() & exact.isnan())
    return float(torch.where(same, 0.0, (result - exact).abs()).max()) if result.numel() else 0.0


def assert_as_eager(got: object, eager: object, exact: object) -> None:
    """Shapes, dtypes and strides of eager; floats no further from float64 than twice eager's own, all else equal."""
    if isinstance(eager, (tuple, list)):
        for parts in zip(got, eager, exact, strict=True):
            assert_as_eager(*parts)
        return
    assert got.shape == eager.shape and got.dtype is eager.dtype
    assert got.stride() == eager.stride()
    if eager.dtype.is_floating_point:
        assert error(got, exact) <= 2 * error(eager, exact) + 1e-6
    else:
        assert torch.equal(got, eager)


def differentiate(results: object) -> None:
    """Run backward from the sum of all differentiable results, each element with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = torch.linspace(-1, 2, leaf.numel(), dtype=torch.float64).view(leaf.shape)
            total = total + (leaf.to(torch.float64) * weights).sum()
    total.backward()


def gradients(tree: object) -> list[torch.Tensor | None]:
    """The gradients of all tensors in a tree, and of the parameters of its modules."""
    results: list[torch.Tensor | None] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            results.append(leaf.grad if leaf.is_leaf else None)
        elif isinstance(leaf, torch.nn.Module):
            results += [parameter.grad for parameter in leaf.parameters()]
    return results


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one element, of tensors that have elements."""
    if tensor.numel() == 0:
        return ()
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _identities(leaves: list[object]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), k) for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def _sharing(leaves: list[object]) -> list[tuple[int, int]]:
    """For each tensor: the first one with the same memory, and how far into it it begins relative to that one."""
    first: dict[int, tuple[int, int]] = {}
    results = []
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.device.type != "meta":
            owner, start = first.setdefault(leaf.untyped_storage().data_ptr(), (k, leaf.data_ptr()))
            results.append((owner, leaf.data_ptr() - start))
    return results
