"""Random numbers: eager's distributions, equal under one seed and in backward, different in the next call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusion
from tests.fusion.agreement import STRICT, agree

Function = Callable[[torch.Tensor], torch.Tensor]
DRAWS: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x.view(4, 100, -1), 0.3),
    "dropout2d": lambda x: F.dropout2d(x.view(10, 40, 10, -1), 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(-x, 0.1, 0.9, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 17),
    "rand": lambda x: torch.rand(x.shape) + 0 * x,
    "randn": lambda x: torch.randn(x.shape, dtype=torch.float64) + 0 * x,
    "randint": lambda x: torch.randint(0, 5, x.shape) + 0 * x,
    "bernoulli": lambda x: torch.bernoulli(x * 0.25),
    "bernoulli_p": lambda x: x.clone().bernoulli_(0.75),
    "uniform": lambda x: torch.empty_like(x).uniform_(-2, 3),
    "normal": lambda x: torch.empty_like(x).normal_(5, 2),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.view(-1, 4), tau=2.0),
}


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise on a fallback, with which eager would be compared with itself."""
    monkeypatch.setenv("FUSION_STRICT", "1")


@pytest.mark.parametrize("name", DRAWS)
def test_distribution_seeds_and_calls(name: str) -> None:
    f = DRAWS[name]
    fused = fusion.fuse(f, options=STRICT)
    x = torch.ones(40000)
    expected, got, again = f(x).double(), fused(x).double(), fused(x).double()
    assert not torch.equal(got, again), "two calls drew the same numbers"
    deviation = float(expected.std())
    count = {"dropout1d": 400, "dropout2d": 400}.get(name, got.numel())  # independent draws
    for result in (got, again):
        assert abs(float(result.mean() - expected.mean())) < 6 * deviation * (2 / count) ** 0.5
        assert abs(float(result.std()) / deviation - 1) < 0.05 + 4 / count**0.5
        assert float(result.min()) >= float(expected.min()) - deviation
        assert float(result.max()) <= float(expected.max()) + 2 * deviation
    torch.manual_seed(5)
    first = (fused(x), fused(x))
    torch.manual_seed(5)
    assert torch.equal(fused(x), first[0]) and torch.equal(fused(x), first[1])
    torch.manual_seed(6)
    assert not torch.equal(fused(x), first[0])


@pytest.mark.parametrize("name", ["dropout", "rrelu", "bernoulli_noise", "two_dropouts", "dropout_of_softmax"])
def test_backward_sees_the_numbers_of_forward(name: str) -> None:
    """Each of these gives y = x·m with a random m that y shows, so that dy/dx must be y / x."""
    functions: dict[str, Function] = {
        "dropout": lambda x: F.dropout(x, 0.4),
        "rrelu": lambda x: F.rrelu(-x, 0.1, 0.9, training=True),
        "bernoulli_noise": lambda x: x * torch.rand_like(x) * torch.bernoulli(torch.full_like(x, 0.5)),
        "two_dropouts": lambda x: F.dropout(F.dropout(x, 0.4) * 3, 0.4),
        "dropout_of_softmax": lambda x: F.dropout(x * torch.softmax(torch.ones_like(x), -1), 0.3),
    }
    fused = fusion.fuse(functions[name], options=STRICT)
    for _ in range(2):
        x = (torch.rand(30, 40) + 0.5).requires_grad_()
        y = fused(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach() / x.detach())
        assert x.grad is not None and x.grad.unique().numel() > 1


def test_each_draw_of_a_program_is_its_own() -> None:
    fused = fusion.fuse(lambda x: (torch.rand_like(x), torch.rand_like(x), F.dropout(x, 0.5), F.dropout(x, 0.5)))
    a, b, c, d = fused(torch.ones(1000))
    assert not torch.equal(a, b) and not torch.equal(c, d)
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.15
    assert abs(float(torch.corrcoef(torch.stack([c, d]))[0, 1])) < 0.15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dropout_that_keeps_all_or_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7).to(dtype)
    x[0, 0] = torch.inf
    agree(lambda x: F.dropout(x, 0.0) * 1, x)
    agree(lambda x: F.dropout(x, 1.0), x)
    agree(lambda x: F.dropout(x, 0.7, training=False) * 1, x)
    agree(lambda x: F.dropout(x, 1.0).sum(), torch.randn(5, requires_grad=True), backward=True)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_dropout_refuses_the_probabilities_that_eager_refuses(p: float) -> None:
    with pytest.raises(Exception, match="probability has to be between 0 and 1"):
        fusion.fuse(lambda x: F.dropout(x, p))(torch.ones(3))


def test_permutations() -> None:
    fused = fusion.fuse(lambda x: x[torch.randperm(x.shape[0])] * 2, options=STRICT)
    x = torch.arange(100.0)
    torch.manual_seed(1)
    first = fused(x)
    assert torch.equal(first.sort().values, x * 2) and not torch.equal(first, fused(x))
    torch.manual_seed(1)
    assert torch.equal(fused(x), first)


def test_choices_by_weight() -> None:
    fused = fusion.fuse(lambda p: torch.multinomial(p.softmax(-1), 2000, replacement=True), options=STRICT)
    p = torch.tensor([0.1, 0.2, 0.7])
    shares = torch.bincount(fused(p.log()), minlength=3) / 2000
    torch.testing.assert_close(shares, p, rtol=0, atol=0.05)


def test_the_state_of_the_generator_moves_and_can_be_restored() -> None:
    fused = fusion.fuse(lambda x: F.dropout(x, 0.5), options=STRICT)
    x = torch.ones(100)
    state = torch.get_rng_state()
    first = fused(x)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(fused(x), first)
    with torch.random.fork_rng():
        inside = fused(x)
    assert torch.equal(fused(x), inside)


def test_a_generator_of_the_callers_own_gives_eagers_numbers() -> None:
    generator = torch.Generator()

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, generator=generator) + x

    x = torch.ones(10)
    generator.manual_seed(3)
    expected = f(x)
    generator.manual_seed(3)
    torch.testing.assert_close(fusion.fuse(f)(x), expected)
