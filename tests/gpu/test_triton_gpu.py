"""Triton kernels on a device: each kind of kernel computes the right values, at small and at large ragged sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.lowering.ir.kernel import Role
from fusion.lowering.ir.scalar_ops import SCALAR_OPS
from tests.codegen.kernels.large import LARGE
from tests.codegen.kernels.making import BF16, F16, F32, F64, I8, LOOP, WHOLE, assert_same, expected, special, tensors
from tests.codegen.kernels.pointwise import add, convert, scalar
from tests.codegen.kernels.products import matmul
from tests.codegen.kernels.rows import fold
from tests.codegen.kernels.small import SMALL
from tests.codegen.triton.test_fields import converted, every_byte
from tests.gpu.launched import build, check

pytestmark = pytest.mark.gpu


CHAINS = (
    "online attention causal",
    "online attention window",
    "attention_dkv causal",
    "attention_dq",
    "linear_logsumexp",
)


@pytest.mark.parametrize("name", SMALL)
def test_small(name: str) -> None:
    check(SMALL[name])


@pytest.mark.parametrize("name", LARGE)
def test_large(name: str) -> None:
    check(LARGE[name])


@pytest.mark.parametrize(
    "name", ["softmax 781", "layernorm bf16", "bias_gelu", "column sum", "gated", "matmul batch", *CHAINS]
)
def test_every_configuration_gives_the_same(name: str) -> None:
    for config in TritonTarget().configs(LARGE[name]):
        check(LARGE[name], config)


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16, torch.int64, torch.int32, I8, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", [name for name in SCALAR_OPS if name != "checked"])  # an assertion ends the process
def test_scalar_op(name: str, dtype: torch.dtype) -> None:
    """Against eager on the device, with the values that are easy to get wrong."""
    given = special(name, dtype, 4096)
    if given is None:
        pytest.skip("eager has no such operation")
    kernel = scalar(name, dtype, 4096)
    given = [tensor.cuda() for tensor in given]
    wide = [x.float() if x.dtype in (F16, BF16) else x for x in given]
    want = SCALAR_OPS[name].meaning(*wide).to(kernel.params[-1].dtype)
    out = torch.empty_like(want)
    build(kernel)(*given, out)
    assert_same(kernel, [*given, out], [*given, want], factor=4.0)


@pytest.mark.parametrize("source", [F16, BF16, F32, F64, I8, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("target", [F16, BF16, F32, F64, I8, torch.int64, torch.uint8, torch.bool], ids=str)
def test_cast(source: torch.dtype, target: torch.dtype) -> None:
    (x,) = special("abs", source, 4096) or [torch.rand(4096) > 0.5]
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool:
        x = torch.where(x.isfinite() & (x.abs() < 100), x, 1)
    x = x.cuda()
    out = torch.empty(4096, dtype=target, device="cuda")
    build(convert(source, target, 4096))(x, out)
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("role", [WHOLE, LOOP])
@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_nan_and_ties(name: str, role: Role) -> None:
    rows = torch.randint(0, 3, (64, 3000)).float()
    rows[::2, 700], rows[::4, 2900] = float("nan"), float("nan")
    rows[1] = float("-inf")
    rows[3] = float("inf")
    kernel = fold(name, 64, 3000, role)
    out = torch.empty(64, dtype=kernel.params[1].dtype, device="cuda")
    build(kernel)(rows.cuda(), out)
    want = getattr(rows, name if name[:3] == "arg" else f"a{name}")(1)  # on the CPU: the lowest index wins there
    torch.testing.assert_close(out.cpu(), want, equal_nan=True)


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_descriptors(dtype: torch.dtype, turned: tuple[bool, bool]) -> None:
    """The persistent form, with blocks that reach past the end in all of m, n and k, in each of its configurations."""
    kernel = matmul(2056, 1048, 1064, dtype, turned=turned)
    a, c = (torch.randn([int(s) for s in p.shape], device="cuda").to(dtype) for p in kernel.params[:2])
    left, right = (x.transpose(1, 2) if turn else x for x, turn in zip((a, c), turned, strict=True))
    want = (left.double() @ right.double()).relu()
    target = TritonTarget()
    persistent = [config for config in target.configs(kernel) if isinstance(config, PersistentConfig)]
    if torch.cuda.get_device_capability() < (9, 0):
        assert not persistent
    for config in persistent:
        assert " TensorDescriptor(" in target.emit(kernel, config)
        out = torch.full((1, 2056, 1048), float("nan"), device="cuda", dtype=dtype)
        build(kernel, config)(a, c, out)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("turned", [(False, False), (True, True)])
def test_float32_products_are_at_least_as_exact_as_the_library(turned: tuple[bool, bool]) -> None:
    kernel = matmul(500, 390, 1030, F32, turned=turned)
    a, c, out = tensors(kernel, "cuda")
    left, right = (x.transpose(1, 2) if turn else x for x, turn in zip((a, c), turned, strict=True))
    launch = build(kernel)
    launch(a, c, out)
    exact = (left.double() @ right.double()).relu()
    assert (out - exact).abs().max() <= 1.2 * ((left @ right).relu() - exact).abs().max()
    left[0, 3, 5], left[0, 7, 1], right[0, 2, 9], left[0, 8, 2] = float("inf"), float("nan"), float("-inf"), 0.0
    launch(a, c, out)
    torch.testing.assert_close(out, (left @ right).relu(), rtol=1e-3, atol=1e-3, equal_nan=True)


def test_offsets_beyond_32_bits() -> None:
    size = (1 << 31) + (1 << 20) + 5
    if torch.cuda.mem_get_info()[0] < 4 * size:
        pytest.skip("needs 8 GB of memory")
    x, y = (torch.ones(size, dtype=I8, device="cuda") for _ in range(2))
    out = torch.zeros(size, dtype=I8, device="cuda")
    y[-3:] = 5
    build(add(size, I8))(x, y, out)
    assert int(out[-1]) == 6 and int(out[-4]) == 2 and int(out[1 << 31]) == 2
    assert bool((out[: 1 << 20] == 2).all())


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("source", [torch.uint8, I8], ids=str)
def test_bits_of_every_byte(source: torch.dtype, dtype: torch.dtype) -> None:
    """On a device this is assembly, which the interpreter only models."""
    kernel = converted(source, dtype, 70_001)
    given = every_byte(source, kernel)
    want = expected(kernel, given)
    got = [tensor.cuda() for tensor in given]
    build(kernel)(*got)
    assert all(torch.equal(actual.cpu(), exact) for actual, exact in zip(got, want, strict=True))
