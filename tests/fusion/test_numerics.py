"""Strict numerics: fused code returns eager's bits, as if every intermediate were stored.

GEMMs of float32 follow the setting of PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import explain, export_kernels, fuse, report
from fusion.codegen.numerics import Numerics
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.targets import TARGETS, builder_for
from fusion.lowering.ir.expr import Expr, make_op
from fusion.lowering.ir.kernel import Kernel, Role, Store
from fusion.options import Options
from tests.codegen.kernels import making

pytestmark = pytest.mark.usefixtures("without_disassembly")

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
STRICT = {"numerics": "strict", "strict": True}


def polynomial(x: Tensor, y: Tensor) -> Tensor:
    """Products and sums whose roundings all show in 16-bit floats."""
    z = x * y + x
    z = (z - y * 3.0) * z + 0.1
    return z / (y * y + 1.0) - x * 0.7


def selected(x: Tensor, y: Tensor) -> Tensor:
    """Bounds, signs and choices among rounded values."""
    z = torch.where(x * y > 0.25, x * y, (x + y).clamp(-0.5, 0.5))
    return torch.maximum(z.abs().floor() * y, torch.relu(x - z)) - torch.sign(y) * z


def converted(x: Tensor, y: Tensor) -> Tensor:
    """Values that are stored in one dtype and needed in another."""
    total = (x + y).float() * 1.1
    return (total.to(x.dtype) * y).double().to(x.dtype) + x.reciprocal()


def viewed(x: Tensor, y: Tensor) -> Tensor:
    """Rounded values read at other places."""
    z = x * y
    return (z.t() * 1.3 + (x - y)[:, :1]).flip(0) + z[0] * z[1]


CHAINS = (polynomial, selected, converted, viewed)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Square matrices of odd size, one of them transposed in memory."""
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(67, 67, generator=generator).to(dtype) for _ in range(2))
    return x, y.t()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
def test_chains_have_the_bits_of_eager(chain: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x, y = operands(dtype)
    fused = fuse(chain, options=STRICT)
    assert torch.equal(fused(x, y), chain(x, y))
    (*_, latest) = report(fused).graphs
    assert not latest.externs
    assert len(latest.kernels) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_negative_zero_stays_one_at_a_bound(dtype: torch.dtype) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        zero = x * 0
        held = torch.relu(zero), zero.clamp(0, 6), zero.clamp(min=0), zero.clamp(max=0), F.hardtanh(zero, 0.0, 1.0)
        return sum(torch.copysign(y, each) * 2**k for k, each in enumerate(held))

    x, y = operands(dtype)
    assert torch.equal(fuse(f, options=STRICT)(x, y), f(x, y))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_by_default_intermediates_are_not_rounded(dtype: torch.dtype) -> None:
    x, y = operands(dtype)
    exact = polynomial(x.double(), y.double())
    ours, eager = fuse(polynomial, options={"strict": True})(x, y), polynomial(x, y)
    assert not torch.equal(ours, eager)
    assert (ours - exact).abs().mean() < (eager - exact).abs().mean()


@pytest.mark.parametrize(
    ("dtype", "other"), [*permutations(HALVES), *((half, torch.float64) for half in HALVES)], ids=str
)
def test_an_intermediate_is_one_number_by_whatever_way_it_is_converted(dtype: torch.dtype, other: torch.dtype) -> None:
    def twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        result = polynomial(x, y)
        return result.to(other), result.float().to(other)

    at_once, by_float = fuse(twice)(*operands(dtype))
    assert torch.equal(at_once, by_float)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_a_chain_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    def given() -> tuple[Tensor, Tensor]:
        x, y = operands(dtype)
        return x.requires_grad_(), y.requires_grad_()

    ours, theirs = given(), given()
    fuse(polynomial, options=STRICT)(*ours).sum().backward()
    polynomial(*theirs).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def normalised(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x * 1.1, x.shape[-1:])


def weighted(x: Tensor) -> Tensor:
    return torch.softmax(x * 3.0, -1) + x


def centred(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * (x * x).sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [normalised, weighted, centred], ids=lambda function: function.__name__)
def test_reductions_are_off_by_their_last_bit(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(33, 301, generator=torch.Generator().manual_seed(3)).to(dtype)
    ours, theirs = fuse(function, options=STRICT)(x), function(x)
    unit = torch.finfo(dtype).eps * theirs.abs().clamp(min=float(theirs.abs().amax(-1).median()) / 8)
    assert ((ours - theirs).abs() <= (1 if dtype in HALVES else 4) * unit).all()
    if dtype in HALVES:
        assert (ours == theirs).float().mean() > 0.99


def test_products_and_attention_are_the_library_s() -> None:
    def layer(x: Tensor) -> Tensor:
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.relu(y @ x.transpose(-1, -2)) + 1.0

    x = torch.randn(2, 4, 256, 64)
    explanation = explain(layer, options={**STRICT, "target": "reference"})(x)
    assert {"aten.bmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"} == {
        extern.name for extern in explanation.externs if extern.reason
    }
    assert torch.equal(fuse(layer, options=STRICT)(x), layer(x))


def test_no_fold_follows_another_one() -> None:
    assert ReferenceTarget().capabilities.follows
    assert not ReferenceTarget(Numerics(strict=True)).capabilities.follows
    long = torch.randn(130, 33_000)  # rows enough for the device, and too long to be held
    texts = {
        numerics: explain(lambda x: torch.softmax(x, -1), options={"numerics": numerics, "target": "reference"})(long)
        for numerics in ("default", "strict")
    }
    carrying = {name: any("carrying" in kernel.source for kernel in result.kernels) for name, result in texts.items()}
    assert carrying == {"default": True, "strict": False}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets")
def test_generated_triton_fuses_no_product_with_a_sum_and_takes_no_quick_form() -> None:
    pytest.importorskip("triton")
    x, y = (making.load(name, making.i, making.F32) for name in "xy")
    product = make_op("add", make_op("mul", x, y), y)
    quick = making.narrowed(make_op("exp", x), making.BF16)
    for value, loose, strict in ((product, "fma.rn.f32", "mul.rn.f32"), (quick, "tl.exp(", "libdevice.exp(")):
        result = _pointwise(value)
        texts = []
        for numerics in (Numerics(), Numerics(strict=True)):
            target = TARGETS["triton"]("sm_90", numerics)
            source = target.emit(result)
            texts.append(source + str(dict(target.stages(result, source))["ptx"]))
        assert loose in texts[0]
        assert loose not in texts[1]
        assert strict in texts[1]


def _pointwise(value: Expr) -> Kernel:
    """out = value, of x and y"""
    params = [making.param(name, making.F32, 256) for name in "xy"]
    out = making.param("out", value.dtype, 256, written=True)
    return making.kernel("pointwise", [*params, out], {making.i: (256, Role.GRID)}, Store("out", making.i, value))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown numerics 'exact'; known: default, strict"):
        Options.read(options={"numerics": "exact"})


# float32 products -----------------------------------------------------------------------------------------------------


@pytest.fixture
def restored_precision() -> Iterator[None]:
    """Restore PyTorch's setting."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def rectified(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


def precisions(terms: int = 512, function: Callable[..., Tensor] = rectified) -> set[str]:
    """Return the precisions that the sources of a product with an epilogue request, for sums of that many terms."""
    result = export_kernels(function, torch.empty(512, terms), torch.empty(terms, 512), arch="sm_80")
    return {part.split('"')[1] for kernel in result.kernels for part in kernel.source.split("input_precision=")[1:]}


@pytest.mark.usefixtures("restored_precision")
def test_generated_products_follow_the_precision_of_matrix_products() -> None:
    torch.set_float32_matmul_precision("highest")
    assert precisions() == {"tf32x3"}
    torch.set_float32_matmul_precision("high")
    assert precisions() == {"tf32"}
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert precisions() == {"tf32x3"}


@pytest.mark.usefixtures("restored_precision")
def test_short_sums_are_multiplied_in_float32() -> None:
    """In two parts they are twice as far from float64 as eager's; a loop over them would take far longer."""
    assert precisions(5) == precisions(16) == {"ieee"}
    assert precisions(17) == precisions(5, lambda x, w: torch.softmax(x @ w, -1) @ w.t()) == {"tf32x3"}
    torch.set_float32_matmul_precision("high")
    assert precisions(5) == {"tf32"}


@pytest.mark.usefixtures("restored_precision")
def test_a_change_of_precision_compiles_again() -> None:
    fused = fuse(lambda x: x @ x + 1.0)
    x = torch.randn(8, 8)
    for precision, count in (("highest", 1), ("high", 2), ("highest", 2)):
        torch.set_float32_matmul_precision(precision)
        fused(x)
        assert len(report(fused).graphs) == count


def test_other_numerics_have_their_own_builder() -> None:
    plain, rounded = builder_for("cpu", "triton"), builder_for("cpu", "triton", Numerics(tf32=True))
    assert plain is not rounded
    assert rounded is builder_for("cpu", "triton", Numerics(tf32=True))


@pytest.mark.parametrize("operation", [torch.var, torch.std, torch.var_mean])
@pytest.mark.parametrize("dim", [0, 1])
def test_variances_far_from_zero(operation: Callable[..., object], dim: int) -> None:
    """The mean of numbers around 10⁵ is off by more than their variance may be; equal numbers have none."""
    x = torch.randn(65, 67, generator=torch.Generator().manual_seed(0)) + 1e5
    x[3], x[:, 3] = 98765.43, 12345.678
    for given in (x, torch.full_like(x, 98765.43)):
        got = fuse(lambda x: operation(x, dim))(given)
        torch.testing.assert_close(got, operation(given, dim), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operation", [torch.var, torch.std, torch.mean])
@pytest.mark.parametrize("shape", [(64, 1000), (64, 257), (1000, 64)], ids=str)
def test_columns_and_their_gradients_are_as_near_as_eager(
    operation: Callable[..., Tensor], shape: tuple[int, int]
) -> None:
    """The gradient of a variance consists of differences from the mean, which show the mean's error."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=draw) + 100, torch.randn(shape[1], generator=draw)

    def gradient_or_mean(f: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        given = x.to(dtype).requires_grad_()
        out = f(given, 0)
        (gradient,) = torch.autograd.grad(out, given, weight.to(dtype))
        return out.detach() if operation is torch.mean else gradient

    exact = gradient_or_mean(operation, torch.float64)
    ours, eager = (
        (gradient_or_mean(f, torch.float32).double() - exact).abs().max()
        for f in (fuse(lambda x, dim: operation(x, dim)), operation)
    )
    assert ours <= 2 * eager


def test_variances_of_long_rows_far_from_zero() -> None:
    """Each part sums differences from the mean of all numbers."""
    x = torch.randn(300_007, generator=torch.Generator().manual_seed(0)) + 1e5
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fused = fuse(lambda x: torch.var(x, 0))
        torch.testing.assert_close(fused(x).double(), torch.var(x.double(), 0), rtol=1e-6, atol=0)
    finally:
        torch.set_num_threads(threads)
    (graph,) = report(fused).graphs
    assert any("part" in kernel.name for kernel in graph.kernels), str(graph)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    "instance": torch.nn.functional.instance_norm,
    "layer": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "group": lambda x: torch.nn.functional.group_norm(x, 3),
}


def trained(norm: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the result of a norm, and the gradient of x for the result's gradient `weight`."""
    leaf = x.clone().requires_grad_()
    result = norm(leaf)
    return [result.detach(), *torch.autograd.grad(result, leaf, weight)]


@pytest.mark.parametrize("name", NORMS)
def test_norms_and_their_gradients_far_from_zero(name: str) -> None:
    """At ten thousand deviations from zero a float32 mean is off by some thousandths of one, as in eager."""
    norm, fused = NORMS[name], fuse(NORMS[name])
    for seed, columns in enumerate((257, 1000, 64, 513)):
        draw = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(3, 6, columns, generator=draw) + 1e4, torch.randn(3, 6, columns, generator=draw)
        exact = trained(norm, x.double(), weight.double())
        for ours, eagers, truth in zip(trained(fused, x, weight), trained(norm, x, weight), exact, strict=True):
            error, own = ((result - truth).abs().max().item() for result in (ours, eagers))
            assert error <= 2 * own + 1e-6, f"{error:.2e}, eager's {own:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [97, 4000])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_equal_numbers_are_zero(name: str, columns: int, dtype: torch.dtype) -> None:
    """The norm divides the error of a mean by the root of epsilon: in float32 this is a factor of 300."""
    norm = NORMS[name]
    numbers = torch.tensor([[65504.0], [1e4 / 3], [-0.1], [12.34567], [-98.7], [1e-3]]).to(dtype)
    x = numbers.expand(6, columns)[None].repeat(2, 1, 1)
    if name == "group":
        x[:, 1::2] = x[:, ::2]  # the channels of a group
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    result, gradient = trained(fuse(norm), x, weight)
    assert not result.any()
    exact = trained(norm, x.double(), weight.double())[1]
    torch.testing.assert_close(gradient.double(), exact, rtol=torch.finfo(dtype).eps, atol=0.03)


@pytest.mark.parametrize("dim", [0, 1])
def test_means_computed_with_variances_of_rows_with_infinities_are_nan(dim: int) -> None:
    """As eager's, which subtracts the infinity with the next number; a single one is its own mean."""
    x = torch.tensor([[1.0, float("inf"), 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    for given in (x, x[:, 1:2]):
        given = given if dim == 1 else given.t().contiguous()
        torch.testing.assert_close(
            fuse(lambda x: torch.var_mean(x, dim))(given), torch.var_mean(given, dim), equal_nan=True
        )


@pytest.mark.parametrize(("shape", "dim"), [((3, 31), 1), ((40, 31), 0)], ids=["rows", "columns"])
def test_flags_of_extremes_are_of_the_numbers_that_were_compared(shape: tuple[int, int], dim: int) -> None:
    """Rows of any length: lanes of a loop and its remainder differ in last bits, and so may two loops over a row."""

    def spread(x: torch.Tensor) -> torch.Tensor:
        activated = F.gelu(x, approximate="tanh")
        return activated.amax(dim) - activated.amin(dim)

    fused = fuse(spread, dynamic=True, options={"strict": True})
    for seed in range(12):
        torch.manual_seed(seed)
        x = torch.randn(shape, requires_grad=True)
        (actual,) = torch.autograd.grad(fused(x).sum(), x)
        (expected,) = torch.autograd.grad(spread(x).sum(), x)
        torch.testing.assert_close(actual, expected)


def test_equal_numbers_of_a_row_stay_equal() -> None:
    """After a function, too, in lanes and in the remainder of a loop: for the position of a maximum and for ties."""

    def extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = torch.tanh(x)
        return y.argmax(-1), y.argmin(-1), y.amax(-1)

    torch.manual_seed(0)
    x = torch.randn(64, 1).repeat(1, 31).requires_grad_()
    places, others, largest = fuse(extremes, options={"strict": True})(x)
    assert not places.any() and not others.any()
    (grad,) = torch.autograd.grad(largest.sum(), x)
    (expected,) = torch.autograd.grad(extremes(x)[2].sum(), x)
    torch.testing.assert_close(grad, expected)


def scaled_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum of two products, one of which is also a result, and the positions of its row maxima."""
    product = x * 2.5
    y = product + (x - 1) * 1.3
    return product, y == y.amax(-1, keepdim=True)


@pytest.mark.parametrize("rows", [4096, 16], ids=["a row per program", "rows in parts"])
def test_a_gpu_computes_a_value_once_that_is_compared_with_its_maximum(rows: int) -> None:
    """The compiler fuses the product that has no other reader with the sum, which may be another one elsewhere."""
    pytest.importorskip("triton")
    x = torch.empty(rows, 163840000 // rows, device="meta")
    result = export_kernels(scaled_twice, x, target="triton", arch="sm_90")
    (compares,) = [kernel for kernel in result.kernels if " == max0" in kernel.source or " == in1" in kernel.source]
    if rows == 4096:  # in two loops of one kernel
        assert "fma.rn.f32" not in compares.artefacts["ptx"] and compares.source.count(" * 2.5") > 1
    else:
        assert " * 2.5" not in compares.source
