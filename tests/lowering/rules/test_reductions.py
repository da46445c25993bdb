"""Reductions, norms, softmax and matrix products against eager, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Contract, Extern, Map, Reduce
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_program
from tests.lowering.lowered import TOLERANCE, calls, check, lowered, single_call, traced

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# Every function is applied to x [3, 7, 5].
REDUCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda x: (x.sum(), x.sum(1), x.sum((0, -1)), x.sum((2, 1), keepdim=True), x.sum(())),
    "mean": lambda x: (x.mean(), x.mean(-1), x.mean((0, 1), keepdim=True)),
    "prod": lambda x: (x.prod(), x.prod(1), x.prod(-1, keepdim=True)),
    "amax": lambda x: (x.amax(), x.amax(1), x.amax((0, 2), keepdim=True)),
    "amin": lambda x: (x.amin(), x.amin(-2), x.amin((0, 2))),
    "max": lambda x: (x.max(), *x.max(1), *x.max(-1, keepdim=True)),
    "min": lambda x: (x.min(), *x.min(0), *x.min(2, keepdim=True)),
    "argmax": lambda x: (x.argmax(), x.argmax(1), x.argmax(-1, keepdim=True)),
    "argmin": lambda x: (x.argmin(), x.argmin(0), x.argmin(2, keepdim=True)),
    "aminmax": lambda x: (*torch.aminmax(x), *torch.aminmax(x, dim=1, keepdim=True)),
    "any": lambda x: ((x > 1).any(), (x > 1).any(1), x.any(-1, keepdim=True), (x > 2).any((0, 1))),
    "all": lambda x: ((x > -1).all(), (x > -1).all(1), x.all(-1), (x > -2).all((0, 1))),
    "count_nonzero": lambda x: (x.count_nonzero(), (x > 0).count_nonzero((0, 2))),
    "var": lambda x: (x.var(), x.var(1), x.var((0, 2), keepdim=True), torch.var(x, 1, correction=0)),
    "std": lambda x: (x.std(), x.std(1, unbiased=False), torch.std(x, (1, 2), correction=2)),
    "var_mean": lambda x: (*torch.var_mean(x), *torch.var_mean(x, 1, correction=0, keepdim=True)),
    "std_mean": lambda x: (*torch.std_mean(x), *torch.std_mean(x, (0, 1))),
    "logsumexp": lambda x: (x.logsumexp(1), x.logsumexp((0, -1), keepdim=True)),
    "norm": lambda x: (x.norm(), x.norm(dim=1), x.norm(3, dim=(0, 2), keepdim=True)),
    "vector_norm": lambda x: tuple(torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, 3.5, math.inf, -math.inf)),
    "nansum": lambda x: torch.nansum(x, 1),
    "softmax": lambda x: (x.softmax(1), x.softmax(-1)),
    "log_softmax": lambda x: (x.log_softmax(0), x.log_softmax(-1)),
    "softmin": lambda x: F.softmin(x, 1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "layer_norm": lambda x: (F.layer_norm(x, (5,)), F.layer_norm(x, (7, 5))),
    "group_norm": lambda x: F.group_norm(x[:, :6], 3),
    "instance_norm": lambda x: F.instance_norm(x),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype):
    if name == "instance_norm":  # PyTorch's own parts round in between
        check(REDUCTIONS[name], torch.randn(3, 7, 5, dtype=dtype), tolerance={2: 0.05}.get(dtype.itemsize, 1e-5))
    else:
        check(REDUCTIONS[name], torch.randn(3, 7, 5, dtype=dtype))


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name not in ("instance_norm", "prod", "normalize")])
def test_reductions_of_computed_values(name: str):
    """The reduced operand is an expression, and the result is used."""

    def around(x: torch.Tensor) -> object:
        result = REDUCTIONS[name](x.transpose(0, 2) * 2 - 1)
        return [part + 1 for part in result] if isinstance(result, tuple) else result + 1

    check(around, torch.randn(5, 7, 3))


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "max", "argmin", "var", "logsumexp", "softmax", "log_softmax"])
def test_special_numbers_in_reductions(name: str):
    rows = [
        [1.0, math.nan, 3.0],
        [math.inf, 1.0, -math.inf],
        [-math.inf] * 3,
        [math.inf, math.inf, 0.0],
        [0.0, -0.0, 0.0],
    ]
    x = torch.tensor(rows)
    functions = {
        "max": lambda x: x.max(1),
        "argmin": lambda x: (x.argmin(1), x.argmax(1)),
        "softmax": lambda x: (x.softmax(1), torch._safe_softmax(x, 1)),
        "log_softmax": lambda x: x.log_softmax(1),
    }
    check(functions.get(name) or (lambda x: getattr(x, name)(1)), x)


def test_ties_go_to_the_first():
    x = torch.tensor([[2.0, 3.0, 3.0, 1.0], [0.0, -0.0, 0.0, 0.0]])
    check(lambda a: (a.argmax(1), a.argmin(1), a.max(1), a.min(1), a.argmax()), x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool], ids=str)
def test_reductions_of_integers(dtype: torch.dtype):
    x = torch.randint(0, 2 if dtype is torch.bool else 100, (4, 6)).to(dtype)
    check(lambda a: (a.sum(), a.sum(1), a.sum(dtype=torch.float32), a.prod(0), a.sum(1, dtype=torch.int32)), x)
    check(lambda a: (a.any(), a.all(1), a.count_nonzero(0), a.amax(1), a.max(0), a.min(), a.float().mean()), x)
    if dtype is not torch.bool:
        check(lambda a: (a.argmax(1), a.argmin(), torch.linalg.vector_norm(a.float(), dim=0)), x)


def test_reductions_with_another_dtype():
    x = torch.randn(4, 6)
    check(lambda a: (a.sum(dtype=torch.float64), a.mean(1, dtype=torch.float64), a.prod(0, dtype=torch.float64)), x)
    check(lambda a: (a.half().sum(0, dtype=torch.float32), a.softmax(1, dtype=torch.float64)), x)
    check(lambda a: (a.bfloat16().softmax(-1, dtype=torch.float32), a.half().norm(dim=1, dtype=torch.float32)), x)


def test_reductions_of_nothing_and_of_one():
    check(lambda a: (a.sum(), a.sum(0), a.mean(0), a.prod(0), a.any(0), a.all(0), a.var(0)), torch.randn(0, 3))
    check(lambda a: (a.sum(1), a.amax(1), a.softmax(1), F.layer_norm(a, (3,))), torch.randn(0, 3))
    check(
        lambda a: (a.sum(), a.mean(), a.amax(), a.argmax(), a.softmax(0), a.var(), a.max(0), a.norm()),
        torch.tensor(2.5),
    )
    check(lambda a: (a.var(1), a.std(0), a.sum(1, keepdim=True), a.argmax(1)), torch.randn(3, 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,)], ids=str)
def test_a_sum_of_negative_zeros_is_positive(shape: tuple[int, ...], dtype: torch.dtype):
    """Of one number without dimensions, too: a sum begins with 0."""

    def sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.sum((), keepdim=True), x.sum(0), x.sum(dtype=torch.float64), x.mean(), x.mean(0), x.nansum()

    x = torch.full(shape, -0.0, dtype=dtype)
    actual = run_program(lowered(sums, x), [x])
    for mine, expected in zip(actual, sums(x), strict=True):
        assert torch.equal(mine.signbit(), expected.signbit())


def test_16_bit_floats_are_summed_in_float32():
    x = torch.full((4096,), 1.0, dtype=torch.float16)
    program = check(lambda a: (a.sum(), a.mean()), x)
    assert {node.dtype for node in program.nodes if isinstance(node, Reduce)} == {torch.float32}


# Norms ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_norms_with_weights(dtype: torch.dtype, affine: bool):
    x, w, b = (torch.randn(*shape, dtype=dtype) for shape in ((4, 6, 8), (8,), (8,)))
    close = {2: 0.05, 4: 1e-5}.get(dtype.itemsize, 1e-11)
    given = (w, b) if affine else ()

    def layer(x: torch.Tensor, w: torch.Tensor | None = None, b: torch.Tensor | None = None) -> object:
        out, mean, rstd = aten.native_layer_norm(x, [8], w, b, 1e-5)
        back = aten.native_layer_norm_backward(x.cos(), x, [8], mean, rstd, w, b, [True, w is not None, b is not None])
        return out, mean, rstd, *(g for g in back if g is not None)

    def group(x: torch.Tensor, w: torch.Tensor | None = None, b: torch.Tensor | None = None) -> object:
        images = x.transpose(1, 2).contiguous()  # [4, 8 channels, 6 pixels]
        out, mean, rstd = aten.native_group_norm(images, w, b, 4, 8, 6, 2, 1e-5)
        back = aten.native_group_norm_backward(
            images.cos(), images, mean, rstd, w, 4, 8, 6, 2, [True, w is not None, w is not None]
        )
        return out, mean, rstd, *(g for g in back if g is not None)

    def batch(x: torch.Tensor, w: torch.Tensor | None = None, b: torch.Tensor | None = None) -> object:
        images = x.transpose(1, 2).contiguous()
        return aten._native_batch_norm_legit.no_stats(images, w, b, True, 0.1, 1e-5)

    for norm in (layer, group, batch):
        check(norm, x, *given, tolerance=close)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(dtype: torch.dtype, affine: bool):
    x, w, g = (torch.randn(*shape, dtype=dtype) for shape in ((4, 6, 8), (8,), (4, 6, 8)))
    weight = w if affine else None
    x.requires_grad_()
    w.requires_grad_()
    out = F.rms_norm(x, (8,), weight, 1e-5)
    rstd = torch.rsqrt(x.detach().double().square().mean(-1, keepdim=True) + 1e-5)
    rstd = rstd.to(torch.float32 if dtype.itemsize == 2 else dtype)
    out.backward(g)
    inputs = [tensor.detach() for tensor in (x, *([w] if affine else []))]
    result = _run(aten._fused_rms_norm.default, (inputs[0], [8], *(inputs[1:] or [None]), 1e-5), (out.detach(), rstd))
    _near(result, (out, rstd), dtype)
    back = (g, inputs[0], [8], rstd, *(inputs[1:] or [None]), [True, affine])
    _near(_run(aten._fused_rms_norm_backward.default, back, (x.grad, w.grad)), (x.grad, w.grad), dtype)
    unset = F.rms_norm(inputs[0], (8,))
    _near(_run(aten._fused_rms_norm.default, (inputs[0], [8], None, None), (unset, rstd))[:1], (unset,), dtype)


def _run(
    target: torch._ops.OpOverload, args: Sequence[object], results: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | int | None]:
    program = lower(single_call(target, args, results))
    verify_program(program)
    assert not calls(program)
    return run_program(program, [arg for arg in args if isinstance(arg, torch.Tensor)])


def _near(actual: Sequence[object], expected: Sequence[torch.Tensor | None], dtype: torch.dtype) -> None:
    close = 4 * TOLERANCE[dtype]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other if other is None else other.detach(), rtol=close, atol=close)


def test_mixed_norm_keeps_float32_weights():
    x, w, b = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8), torch.randn(8)
    check(lambda x, w, b: aten.native_layer_norm(x, [8], w, b, 1e-5)[0], x, w, b)


def test_batch_norm_in_training_updates_its_statistics():
    x, w, b, mean, variance = torch.randn(4, 3, 5), torch.rand(3), torch.rand(3), torch.rand(3), torch.rand(3)

    def functional(*args: torch.Tensor) -> object:
        return aten._native_batch_norm_legit_functional(*args, True, 0.1, 1e-5)

    program = lowered(functional, x, w, b, mean, variance)
    assert not calls(program)
    module = torch.nn.BatchNorm1d(3)
    module.load_state_dict(
        {"weight": w, "bias": b, "running_mean": mean, "running_var": variance, "num_batches_tracked": torch.tensor(0)}
    )
    expected = module(x)
    out, _, _, new_mean, new_variance = run_program(program, [x, w, b, mean, variance])
    torch.testing.assert_close([out, new_mean, new_variance], [expected, module.running_mean, module.running_var])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_gradients(dtype: torch.dtype):
    g, x = torch.randn(4, 9, dtype=dtype), torch.randn(4, 9, dtype=dtype)
    check(lambda g, x: aten._softmax_backward_data(g, x.softmax(1), 1, g.dtype), g, x)
    check(lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(1), 1, g.dtype), g, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("target", [aten._softmax, aten._log_softmax], ids=str)
def test_softmax_in_one_piece(target: Callable[..., torch.Tensor], dtype: torch.dtype):
    x = torch.randn(4, 9, dtype=dtype)
    program = lower(traced(lambda x: target(x * 2, 1, False), [x], whole=True))
    verify_program(program)
    assert [type(node) for node in program.nodes] == [Map, Reduce, Reduce, Map]
    _near(run_program(program, [x]), [target(x * 2, 1, False)], dtype)


@pytest.mark.parametrize("name", ["sum", "mean", "argmax", "var", "softmax", "logsumexp", "layer_norm"])
def test_symbolic_reductions(name: str):
    functions: dict[str, Callable[[torch.Tensor], object]] = {
        "argmax": lambda x: (x.argmax(), x.argmax(1)),
        "var": lambda x: (x.var(), x.var(1), x.var((0, 2))),
        "layer_norm": lambda x: F.layer_norm(x, (5,)),
    }
    check(functions.get(name) or REDUCTIONS[name], torch.randn(3, 7, 5), mode="symbolic")


def test_a_real_number_computed_from_sizes():
    def functional(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> object:
        return aten._native_batch_norm_legit_functional(x, None, None, mean, variance, True, 0.1, 1e-5)

    inputs = torch.randn(4, 3, 5), torch.rand(3), torch.rand(3)
    program = lowered(functional, *inputs, mode="symbolic")  # variance·n / (n - 1), n symbolic
    for one, other in zip(run_program(program, inputs), run_program(lowered(functional, *inputs), inputs), strict=True):
        torch.testing.assert_close(one, other)


# Products -------------------------------------------------------------------------------------------------------------

# a [4, 6], b [6, 5], c [3, 4, 6], d [3, 6, 5], v [6], w [4]
PRODUCTS: dict[str, Callable[..., object]] = {
    "mm": lambda a, b, c, d, v, w: a @ b,
    "mm_transposed": lambda a, b, c, d, v, w: b.t() @ a.t(),
    "bmm": lambda a, b, c, d, v, w: c @ d,
    "broadcast": lambda a, b, c, d, v, w: a @ d,
    "linear": lambda a, b, c, d, v, w: F.linear(c, b.t(), b[0]),
    "addmm": lambda a, b, c, d, v, w: torch.addmm(b[0], a, b, beta=0.5, alpha=2),
    "addmm_beta_0": lambda a, b, c, d, v, w: torch.addmm(b[0] / 0, a, b, beta=0),
    "baddbmm": lambda a, b, c, d, v, w: torch.baddbmm(c[:, :, :5], c, d, alpha=0.5),
    "mv": lambda a, b, c, d, v, w: a @ v,
    "addmv": lambda a, b, c, d, v, w: torch.addmv(w, a, v, beta=2, alpha=0.5),
    "dot": lambda a, b, c, d, v, w: (v @ v, torch.dot(v, v * 2), torch.vdot(v, v)),
    "outer": lambda a, b, c, d, v, w: (torch.outer(v, w), torch.addr(a, w, v, alpha=2)),
    "einsum": lambda a, b, c, d, v, w: torch.einsum("bij,bjk->bki", c, d),
    "of_a_computed_operand": lambda a, b, c, d, v, w: (a * 2 + 1) @ b.exp(),
    "attention": lambda a, b, c, d, v, w: (c @ c.transpose(1, 2) * 0.5).softmax(-1) @ c,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, dtype: torch.dtype):
    shapes = (4, 6), (6, 5), (3, 4, 6), (3, 6, 5), (6,), (4,)
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
    close = {torch.float16: 0.01, torch.bfloat16: 0.1, torch.float32: 1e-5}.get(dtype, 1e-12)
    check(PRODUCTS[name], *inputs, tolerance=close)


def test_products_of_bytes():
    a, b = torch.randint(-128, 128, (32, 16), dtype=torch.int8), torch.randint(-128, 128, (16, 8), dtype=torch.int8)
    check(torch._int_mm, a, b)
    check(torch.mm, a, b)
    program = lower(traced(torch._int_mm, [a, b]))
    (product,) = (node for node in program.nodes if isinstance(node, Contract))
    called = program.edited([step for node in program.nodes for step in program.library.get(node.out, (node,))])
    assert product not in called.nodes
    torch.testing.assert_close(run_program(called, [a, b])[0], torch._int_mm(a, b))


def test_products_are_library_calls_where_they_are_not_generated():
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    check(torch.mm, a, b, contractions=(), leaves=["mm.default"])


def test_products_that_are_small_or_with_a_vector_are_sums():
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    check(torch.mv, a, b[:, 0], contractions=())
    program = lower(traced(torch.mm, [a, b]), contractions=(), small={4: 4 * 6 * 5})
    assert not any(isinstance(node, Extern) for node in program.nodes)
    torch.testing.assert_close(run_program(program, [a, b])[0], a @ b)


def test_the_library_form_of_a_product_consists_of_calls():
    for function in (
        lambda a, b: a @ b.t(),
        lambda a, b: a.view(3, 2, 4).transpose(1, 2) @ b.view(3, 4, 2).transpose(1, 2),
        lambda a, b: a.flip(0) @ b.t().contiguous(),
        lambda a, b: torch.softmax(a, 1) @ b.t(),
        lambda a, b: torch.softmax(a, 1).t() @ (b * b.sum()),
    ):
        program = lowered(function, torch.randn(6, 4), torch.randn(6, 4))
        (product,) = (node for node in program.nodes if isinstance(node, Contract))
        assert program.library[product.out]  # the verifier has checked its operands
