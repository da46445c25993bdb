"""Constants, ranges and random numbers: tensors without inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion.lowering.interpret import run_program
from fusion.lowering.ir.expr import postorder
from fusion.lowering.ir.program import Extern
from tests.lowering.lowered import calls, check, lowered

aten = torch.ops.aten

CREATED: dict[str, Callable[[torch.Tensor], object]] = {
    "full": lambda x: (torch.full((2, 3), 1.5), torch.full((2,), 7), torch.full((2,), True), x.new_full((3,), 2)),
    "full_like": lambda x: (torch.full_like(x, -math.inf), torch.full_like(x, 3, dtype=torch.int32)),
    "zeros": lambda x: (torch.zeros(2, 3), torch.zeros_like(x), x.new_zeros(4, dtype=torch.bool)),
    "ones": lambda x: (torch.ones(2, 3, dtype=torch.int64), torch.ones_like(x), x.new_ones(4)),
    "halves": lambda x: torch.full((2,), 0.1, dtype=torch.float16),
    "arange": lambda x: (torch.arange(5), torch.arange(2, 11, 3), torch.arange(5, 0, -2), torch.arange(0)),
    "arange_of_floats": lambda x: (torch.arange(0, 1, 0.1), torch.arange(5.0), torch.arange(1.5, -3, -0.7)),
    "arange_as": lambda x: (torch.arange(5, dtype=torch.float16), torch.arange(2.5, 6, dtype=torch.int64)),
    "linspace": lambda x: (torch.linspace(0, 1, 7), torch.linspace(-3, 2, 50), torch.linspace(2, 5, 1)),
    "eye": lambda x: (torch.eye(3), torch.eye(2, 4, dtype=torch.int32)),
    "scalar_tensor": lambda x: (torch.scalar_tensor(2.5), torch.scalar_tensor(3, dtype=torch.int64)),
    "tril_indices": lambda x: (torch.tril_indices(3, 4), torch.triu_indices(3, 4, 1)),
    "window": lambda x: (0.5 - 0.5 * torch.cos(torch.arange(7, dtype=torch.float32) * (math.pi / 3)))[:6],
    "fill": lambda x: (aten.fill(x, 2.5), aten.fill(x, torch.full((), 3))),
    "copy": lambda x: aten.copy(x, torch.arange(5)),
}


@pytest.mark.parametrize("name", CREATED)
def test_created_tensors(name: str):
    program = check(CREATED[name], torch.randn(4, 5))
    assert not calls(program)


def test_a_created_tensor_that_is_only_read_costs_no_node():
    program = check(lambda x: x * torch.full_like(x, 2.0) + torch.arange(5) * torch.ones(4, 1), torch.randn(4, 5))
    assert len(program.nodes) == 3  # two products and their sum


def test_uninitialised_memory_is_allocated():
    x = torch.randn(4, 3).t()
    program = lowered(lambda x: torch.empty_like(x), x)
    assert not calls(program)
    (memory,) = run_program(program, [x])
    assert (memory.shape, memory.stride(), memory.dtype) == (x.shape, x.stride(), x.dtype)


def test_memory_of_no_elements_is_not():
    check(lambda x: (torch.empty(0), torch.empty_strided((2, 0), (1, 1)), x + 1), torch.randn(3))


# Random numbers -------------------------------------------------------------------------------------------------------

SIZE = 20_000


def drawn(function: Callable[..., object], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of one run of the lowered function."""
    program = lowered(function, *inputs)
    assert not calls(program)
    return [out for out in run_program(program, inputs) if isinstance(out, torch.Tensor)]


UNIFORM: dict[str, tuple[Callable[[torch.Tensor], object], float, float]] = {
    "rand": (lambda x: torch.rand(SIZE), 0, 1),
    "rand_double": (lambda x: torch.rand(SIZE, dtype=torch.float64), 0, 1),
    "rand_half": (lambda x: torch.rand(SIZE, dtype=torch.float16), 0, 1),
    "rand_bfloat16": (lambda x: torch.rand(SIZE, dtype=torch.bfloat16), 0, 1),
    "rand_like": (torch.rand_like, 0, 1),
    "uniform": (lambda x: aten.uniform(x, -3, 5), -3, 5),
    "uniform_half": (lambda x: aten.uniform(x.half(), 2, 3), 2, 3),
    "uniform_bfloat16": (lambda x: aten.uniform(x.bfloat16(), 2, 4), 2, 4),
    "uniform_inexact": (lambda x: aten.uniform(x.bfloat16(), 0, 0.1), 0, 0.1),
    "uniform_double": (lambda x: aten.uniform(x.double(), 2, 3), 2, 3),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_uniform(name: str):
    function, low, high = UNIFORM[name]
    (out,) = drawn(function, torch.zeros(SIZE))
    values = out.double()
    width = high - low
    assert values.min() >= low
    assert values.max() < high
    assert abs(values.mean() - (low + high) / 2) < 0.02 * width
    assert abs(values.var() - width**2 / 12) < 0.02 * width**2
    counts = torch.histc(values, 10, low, high)
    assert (counts - SIZE / 10).abs().max() < 6 * math.sqrt(SIZE / 10)


NORMAL: dict[str, tuple[Callable[[torch.Tensor], object], float, float]] = {
    "randn": (lambda x: torch.randn(SIZE), 0, 1),
    "randn_double": (lambda x: torch.randn(SIZE, dtype=torch.float64), 0, 1),
    "randn_half": (lambda x: torch.randn(SIZE, dtype=torch.float16), 0, 1),
    "randn_like": (torch.randn_like, 0, 1),
    "normal_functional": (lambda x: aten.normal_functional(x, 3, 2), 3, 2),
    "normal": (lambda x: torch.normal(x + 3, x + 2), 3, 2),
    "normal_of_one_mean": (lambda x: torch.normal(3.0, x + 2), 3, 2),
}


@pytest.mark.parametrize("name", NORMAL)
def test_normal(name: str):
    function, mean, std = NORMAL[name]
    (out,) = drawn(function, torch.zeros(SIZE))
    values = (out.double() - mean) / std
    assert abs(values.mean()) < 0.04
    assert abs(values.std() - 1) < 0.04
    assert abs((values.abs() < 1).double().mean() - 0.6827) < 0.02
    assert values.abs().max() > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool], ids=str)
def test_coins(dtype: torch.dtype):
    (out,) = drawn(lambda x: aten.bernoulli.p(x, 0.3), torch.zeros(SIZE, dtype=dtype))
    assert out.dtype is dtype
    assert set(out.double().unique().tolist()) == {0.0, 1.0}
    assert abs(out.double().mean() - 0.3) < 0.02


def test_coins_with_a_probability_each():
    p = torch.tensor([0.0, 0.25, 1.0]).repeat_interleave(SIZE)
    (out,) = drawn(torch.bernoulli, p)
    shares = out.view(3, SIZE).mean(1)
    assert shares[0] == 0
    assert abs(shares[1] - 0.25) < 0.02
    assert shares[2] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout(dtype: torch.dtype):
    x = torch.rand(SIZE, dtype=dtype) + 0.5
    out, mask = drawn(lambda x: aten.native_dropout(x, 0.25, True), x)
    assert mask.dtype is torch.bool
    assert abs(mask.double().mean() - 0.75) < 0.02
    torch.testing.assert_close(out, torch.where(mask, x / 0.75, 0).to(dtype))
    check(lambda g, m: aten.native_dropout_backward(g, m, 4 / 3), x, mask)


def test_dropout_that_drops_nothing_or_all():
    x = torch.randn(50)
    check(lambda x: aten.native_dropout(x, 0.5, False), x)
    program = lowered(lambda x: aten.native_dropout(x, 1.0, True), x)
    out, mask = (part for part in run_program(program, [x]) if isinstance(part, torch.Tensor))
    assert not mask.any()
    assert not out.any()


def test_fresh_each_call_and_the_same_under_the_same_seed():
    x = torch.zeros(100)
    program = lowered(lambda x: (torch.rand_like(x), torch.rand_like(x)), x)
    torch.manual_seed(7)
    first, second = run_program(program, [x]), run_program(program, [x])
    torch.manual_seed(7)
    again = run_program(program, [x])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(part.tolist()) for part in (*first, *second)}) == 4


def test_random_numbers_do_not_depend_on_the_order_of_reads():
    x = torch.zeros(6, 4)

    def function(x: torch.Tensor) -> object:
        noise = torch.rand_like(x)
        return noise, noise.t() + 1, noise[2:], noise.sum(0)

    noise, turned, part, total = drawn(function, x)
    torch.testing.assert_close([turned, part, total], [noise.t() + 1, noise[2:], noise.sum(0)])


DISTRIBUTED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], float], tuple[float, ...]]] = {
    "exponential": (lambda x: aten.exponential(x, 2.0), lambda v: 1 - math.exp(-2 * v), (0.1, 0.5, 1.5)),
    "cauchy": (
        lambda x: aten.cauchy(x, 1.0, 2.0),
        lambda v: 0.5 + math.atan((v - 1) / 2) / math.pi,
        (-9.0, 0.0, 1.0, 7.0),
    ),
    "log_normal": (
        lambda x: aten.log_normal(x, 0.5, 1.5),
        lambda v: 0.5 * (1 + math.erf((math.log(v) - 0.5) / (1.5 * math.sqrt(2)))),
        (0.3, 1.6, 6.0),
    ),
    "geometric": (lambda x: aten.geometric(x, 0.3), lambda v: 1 - 0.7 ** math.floor(v), (1.0, 2.5, 6.0)),
}
"""A draw, its distribution function, and where to look at that."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributions_by_inversion(name: str, dtype: torch.dtype):
    draw, below, points = DISTRIBUTED[name]
    (numbers,) = drawn(draw, torch.empty(SIZE, dtype=dtype))
    assert numbers.dtype is dtype and bool(numbers.isfinite().all())
    for point in points:
        share = (numbers.double() <= point).double().mean().item()
        assert abs(share - below(point)) < 0.02  # five deviations, and the rounding of a bfloat16


def test_other_draws_are_the_librarys():
    for function in (
        lambda x: torch.randint(0, 2**33, (3,)),
        lambda x: torch.randperm(5),
        lambda x: torch.multinomial((x + 1).expand(65, 3).t(), 2),
        lambda x: aten.poisson(x),
    ):
        assert len(calls(lowered(function, torch.zeros(3)))) == 1


def test_functional_dropout_is_lowered():
    (out,) = drawn(lambda x: F.alpha_dropout(x, 0.0, training=False) * 1, torch.ones(5))
    assert torch.equal(out, torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_integers_are_drawn_evenly(dtype: torch.dtype):
    (numbers,) = drawn(lambda: torch.randint(3, 8, (SIZE,), dtype=dtype))
    assert numbers.dtype is dtype
    counts = torch.bincount(numbers.long(), minlength=8)
    assert counts[:3].sum() == 0
    assert len(counts) == 8
    assert bool(((counts[3:] / SIZE - 0.2).abs() < 0.02).all())
    (like,) = drawn(lambda x: torch.randint_like(x, 2**32), torch.empty(SIZE, dtype=torch.int64))
    assert abs(like.double().mean().item() / 2**31 - 1) < 0.05
    assert like.unique().numel() > SIZE * 0.99


def test_a_randomised_rectifier():
    x = torch.linspace(-4, 4, SIZE)
    out, slopes = drawn(lambda x: aten.rrelu_with_noise_functional(x, torch.ones_like(x), 0.25, 0.5, True), x)
    torch.testing.assert_close(out, x * slopes)
    slopes = slopes[x < 0]
    assert torch.equal(out[x > 0], x[x > 0])
    assert bool(((slopes >= 0.25 - 1e-6) & (slopes <= 0.5)).all())
    assert abs(slopes.mean().item() - 0.375) < 0.01
    even, _ = drawn(lambda x: aten.rrelu_with_noise_functional(x, torch.ones_like(x), 0.25, 0.5), x)
    torch.testing.assert_close(even, F.rrelu(x, 0.25, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_choices_by_weight(dtype: torch.dtype):
    weights = torch.tensor([[1.0, 0.0, 2.0, 5.0], [0.0, 3.0, 1.0, 0.0]], dtype=dtype)
    (again,) = drawn(lambda w: torch.multinomial(w, SIZE, replacement=True), weights)
    (once,) = drawn(lambda w: torch.multinomial(w, 1), weights[:, None].expand(2, SIZE, 4).reshape(-1, 4))
    for places in (again, once.view(2, SIZE)):
        for row, numbers in zip(weights.double(), places, strict=True):
            shares = torch.bincount(numbers, minlength=4) / SIZE
            assert (shares - row / row.sum()).abs().max() < 0.02  # five deviations
            assert (shares == 0).equal(row == 0)  # never an element without weight


def test_choices_without_replacement():
    weights = torch.tensor([1.0, 2.0, 4.0, 0.0, 8.0]).expand(SIZE, 5)
    (places,) = drawn(lambda w: torch.multinomial(w, 3), weights.contiguous())
    assert places.shape == (SIZE, 3)
    assert not (places == 3).any()
    assert (places.sort(1).values.diff(dim=1) > 0).all()  # each once
    eager = torch.multinomial(weights, 3)
    for k in range(3):
        ours, theirs = (torch.bincount(result[:, k], minlength=5) / SIZE for result in (places, eager))
        assert (ours - theirs).abs().max() < 0.03
    (alone,) = drawn(lambda w: torch.multinomial(w, 2, replacement=True), weights[0])
    assert alone.shape == (2,)


def test_a_search_grows_with_its_steps_alone():
    """Twice as many weights are one more step, which continues from the last position: nothing is computed twice."""

    def size(count: int) -> int:
        program = lowered(lambda w: torch.multinomial(w, 3, replacement=True), torch.rand(2, count))
        return sum(len(postorder(*node.exprs)) for node in program.nodes if not isinstance(node, Extern))

    sizes = [size(2**steps - 1) for steps in (6, 8, 10, 12)]
    assert sizes[3] - sizes[2] == sizes[2] - sizes[1] == sizes[1] - sizes[0]
