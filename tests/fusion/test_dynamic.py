"""Dynamic shapes: one compilation serves changing sizes, is as right as eager, and fuses as much as for fixed sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from fusion.backend import Backend
from fusion.inspect.report import Report
from fusion.options import Options

Tensors = tuple[torch.Tensor, ...]
Program = Callable[..., "torch.Tensor | Tensors"]
WIDTH, HEADS, WORDS = 16, 4, 41
LENGTHS = (*range(3, 27), 33, 64, 7, 100)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights(*shape: int) -> torch.Tensor:
    return normal(*shape) / math.sqrt(shape[0])


# Programs -------------------------------------------------------------------------------------------------------------


def perceptron(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ a) @ b + x


def heads(x: torch.Tensor, into: torch.Tensor) -> Tensors:
    batch, length, width = x.shape
    parts = torch.split(x @ into, width, -1)
    return tuple(part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)


def by_hand(x: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    q, k, v = heads(x, into)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.tril(torch.ones(x.shape[1], x.shape[1])) == 0, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape) @ out


def in_one_piece(x: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    q, k, v = heads(x, into)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(x.shape) @ out


def loss(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, (x.shape[-1],), scale, shift)
    return F.cross_entropy((h @ w).view(-1, w.shape[1]), t.view(-1))


def embedded(t: torch.Tensor, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return F.embedding(t, words) + F.embedding(torch.arange(t.shape[1]), places)


def gathered(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return x.gather(1, (t % x.shape[1])[..., None].expand(-1, -1, WIDTH)) * 2 + x[:, :1]


def joined(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    z = torch.cat([x, y, x], 1)
    first, second = torch.split(z, [x.shape[1], z.shape[1] - x.shape[1]], 1)
    return F.pad(first * 2, (0, 0, 1, 2)) + 1, second.sum(1), F.pad(z[:, 1:-1], (0, 0, 3, 0), value=1.0), z[:, ::2] * 2


def reduced(x: torch.Tensor) -> Tensors:
    return x.sum(1), x.mean(-2), x.amax(1), x.var(1), x.argmax(1), torch.logsumexp(x, 1), x.std(), x.cumsum(1)


def viewed(x: torch.Tensor) -> Tensors:
    batch, length, width = x.shape
    scaled = x.view(batch, length, -1, 4).sum(-1).view(batch, length, -1) * torch.arange(length)[None, :, None]
    return scaled, x.reshape(batch * length, -1).flatten() + 1, x.transpose(0, 1).reshape(length, batch * width).relu()


def halved(x: torch.Tensor) -> Tensors:
    """An odd batch would be refused: that it is even is known by a guard."""
    pairs = x.reshape(2, -1, *x.shape[1:])
    return pairs.amax(1), pairs.relu() + 1, pairs[0] * 2


def masked(x: torch.Tensor) -> Tensors:
    length = x.shape[1]
    mask, i = torch.tril(torch.ones(length, length, dtype=x.dtype)), torch.arange(length)
    seen = torch.where(i[:, None] >= i, x @ x.transpose(1, 2), 0)
    return (mask @ x) / mask.sum(1)[:, None], seen.sum(-1), torch.triu(torch.ones(length, length), 1) * 2


def pictures(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = x.unsqueeze(1)
    x = F.max_pool2d(F.relu(F.conv2d(x, a, padding=1)), 2, ceil_mode=True)
    x = F.avg_pool2d(F.conv2d(x, b, padding=1), 3, stride=2, padding=1)
    return F.group_norm(x, 2).relu().mean((-2, -1))


def rows(batch: int, length: int) -> torch.Tensor:
    return normal(batch, length, WIDTH)


def words(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(length))


INTO, OUT = weights(WIDTH, 3 * WIDTH), weights(WIDTH, WIDTH)
PROGRAMS: dict[str, tuple[Program, Callable[[int, int], Tensors]]] = {
    "perceptron": (perceptron, lambda b, t: (rows(b, t), weights(WIDTH, 32), weights(32, WIDTH))),
    "by_hand": (by_hand, lambda b, t: (rows(b, t), INTO, OUT)),
    "in_one_piece": (in_one_piece, lambda b, t: (rows(b, t), INTO, OUT)),
    "loss": (loss, lambda b, t: (rows(b, t), normal(WIDTH), normal(WIDTH), weights(WIDTH, WORDS), words(b, t))),
    "embedded": (embedded, lambda b, t: (words(b, t), weights(WORDS, WIDTH), weights(128, WIDTH))),
    "gathered": (gathered, lambda b, t: (rows(b, t), words(b, t))),
    "joined": (joined, lambda b, t: (rows(b, t), rows(b, t + 3))),
    "reduced": (reduced, lambda b, t: (rows(b, t),)),
    "viewed": (viewed, lambda b, t: (rows(b, t),)),
    "halved": (halved, lambda b, t: (rows(2 * b, 2 * t),)),
    "masked": (masked, lambda b, t: (rows(b, t),)),
    "pictures": (pictures, lambda b, t: (rows(b, t), weights(8, 1, 3, 3), weights(8, 8, 3, 3))),
}


def outcome(program: Program, given: Tensors, dtype: torch.dtype, *, train: bool) -> list[torch.Tensor]:
    """Return the results of a program and, in training, the gradients of its inputs."""
    given = tuple(x.to(dtype) if x.is_floating_point() else x for x in given)
    leaves = [x.detach().requires_grad_(train and x.is_floating_point()) for x in given]
    example = program(*leaves)
    results = list(example) if isinstance(example, tuple) else [example]
    if train:
        torch.autograd.backward([x.sum() for x in results if x.requires_grad])
    return [x.detach() for x in results] + [x.grad for x in leaves if x.grad is not None]


def check(program: Program, fused: Program, given: Tensors, *, train: bool) -> None:
    """Errors are no larger than twice eager's own; layouts are eager's."""
    ours = outcome(fused, given, torch.float32, train=train)
    theirs = outcome(program, given, torch.float32, train=train)
    exact = outcome(program, given, torch.float64, train=train)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        if a.is_floating_point():
            assert (a - c).norm() <= 2 * (b - c).norm() + 1e-6 * (1 + c.norm())
        else:
            assert torch.equal(a, b)


def fused(program: Program, dynamic: bool | None) -> tuple[Program, list[Report]]:
    torch._dynamo.reset()
    backend = Backend(Options(strict=True))
    return torch.compile(program, backend=backend, dynamic=dynamic), backend.reports


def forwards(reports: Sequence[Report]) -> int:
    return sum(report.label != "backward" for report in reports)


LEFT = {"embedded", "pictures"}
"""Programs with a call that is decomposed for known sizes only: a scatter of few sources, a pooling."""
EVEN_ROWS = torch.__version__ < "2.13"
"""Does PyTorch guard whether a pooling that halves the rows has an even number of them?"""
PRODUCTS = {"aten.mm.default", "aten.bmm.default", "aten.addmm.default"}
"""Generated where they are known to be small."""


# Tests ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "pictures"])
def test_lengths_that_change_compile_twice(name: str) -> None:
    """The first length is compiled statically, the second one for all others."""
    program, inputs = PROGRAMS[name]
    ours, reports = fused(program, None)
    for length in LENGTHS:
        check(program, ours, inputs(2, length), train=False)
    assert forwards(reports) == 2


def test_fifty_calls_with_other_batches_and_lengths_compile_twice() -> None:
    """The third compilation is for a length of 1, the fourth for a batch of 1, the fifth for an empty batch."""
    program, inputs = PROGRAMS["perceptron"]
    ours, reports = fused(program, None)
    for call in range(50):
        check(program, ours, inputs(3 + call % 7, 2 + call * 3 % 47), train=True)
    assert forwards(reports) == 2
    for batch, length in ((4, 1), (7, 1), (1, 5), (1, 8), (0, 6), (0, 9), (5, 2)):
        check(program, ours, inputs(batch, length), train=True)
    assert forwards(reports) <= 5


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "gathered"])
def test_training_compiles_once_for_all_sizes(name: str) -> None:
    program, inputs = PROGRAMS[name]
    ours, reports = fused(program, True)
    for batch, length in ((5, 17), (2, 9), (6, 33), (4, 16)):
        check(program, ours, inputs(batch, length), train=True)
    assert len(reports) == (4 if name == "pictures" and EVEN_ROWS else 2)
    static, fixed = fused(program, False)
    check(program, static, inputs(5, 17), train=True)
    for changing, known in zip(reports[:2], fixed, strict=True):
        assert len(changing.kernels) <= len(known.kernels) + 1
        if name not in LEFT:
            assert {extern.name for extern in changing.externs} <= PRODUCTS | {e.name for e in known.externs}


def test_long_reductions_are_split_whatever_their_length() -> None:
    """The number of parts is chosen for the first call; of a shorter reduction, some parts are empty."""

    def program(x: torch.Tensor) -> Tensors:
        flat = x.reshape(-1, x.shape[-1])
        return flat.sum(0), (x * x).sum((0, 1)), x.amax((0, 1)), x.logsumexp((0, 1)), torch.softmax(flat.sum(1), 0)

    ours, reports = fused(program, True)
    for batch, length in ((20, 700), (2, 3), (7, 33)):
        check(program, ours, (normal(batch, length, WIDTH),), train=False)
    (report,) = reports
    assert sum("_part" in kernel.name for kernel in report.kernels) >= 2


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("name", ["perceptron", "reduced"])
def test_sizes_of_zero_and_one_are_compiled_for_themselves(name: str, size: int) -> None:
    program, inputs = PROGRAMS[name]
    if name == "reduced" and size == 0:
        program = lambda x: (x.sum(1), x * 2, x.mean(-1))  # noqa: E731  # others refuse empty tensors
    ours, _ = fused(program, True)
    with torch.no_grad():
        for batch, length in ((2, 5), (size, 5), (2, size), (3, 7)):
            given = inputs(batch, length)
            torch.testing.assert_close(ours(*given), program(*given), equal_nan=True)


def test_width_of_a_head_is_guarded() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    ours, reports = fused(attention, True)
    for length, width in ((40, 8), (70, 8), (33, 8), (50, 12), (31, 12)):
        given = tuple(normal(2, 3, length, width) for _ in range(3))
        check(attention, ours, given, train=False)
    assert forwards(reports) == 2  # one for each width


def test_the_width_of_the_operand_of_scores_is_guarded() -> None:
    """A kernel holds it whole: with an unknown width, no tile of a GPU would be large enough."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    ours, reports = fused(attention, True)
    for length, width in ((40, 12), (70, 12), (50, 20), (31, 20)):
        given = (*(normal(2, 3, length, 8) for _ in range(2)), normal(2, 3, length, width))
        check(attention, ours, given, train=False)
    assert forwards(reports) == 2  # one for each width


def test_strides_that_change_are_followed() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1) + x.sum(0)

    ours, reports = fused(scaled, True)
    for base in (normal(6, 9), normal(8, 7), normal(5, 12)):
        for x in (base, base.t(), base[::2], base[:, 1:]):
            torch.testing.assert_close(ours(x), scaled(x))
    assert forwards(reports) <= 4  # orders of strides, each once


def test_one_graph_for_marked_sizes_of_two_inputs() -> None:
    """Marked sizes have symbols of their own; only a guard knows that rows and labels are equally many."""
    program, inputs = PROGRAMS["loss"]
    ours, reports = fused(program, None)
    for batch, length in ((3, 17), (2, 9), (5, 21)):
        given = inputs(batch, length)
        for x in (given[0], given[-1]):
            torch._dynamo.mark_dynamic(x, [0, 1])
        with torch.no_grad():
            torch.testing.assert_close(ours(*given), program(*given))
    assert forwards(reports) == 1
    assert not any("cannot see" in extern.reason for report in reports for extern in report.externs)


@pytest.mark.parametrize("lengths", [(64, 128, 40), (300, 512, 40)])
def test_attention_of_any_width(lengths: Sequence[int]) -> None:
    """A chained product holds all its columns in a program, so that their number is not symbolic."""

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v

    ours, reports = fused(program, None)
    for width in lengths:
        given = [torch.randn(1, 2, 1024, width) for _ in range(3)]
        with torch.no_grad():
            torch.testing.assert_close(ours(*given), program(*given))
    assert forwards(reports) <= 3  # any multiple of 8 or 16 once, and any number


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps, self.scales = 0.5, [2.0, 3.0]

    def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
        normed = F.layer_norm(x, (x.shape[-1],), eps=self.eps)
        return normed * math.sqrt(2 / math.pi) * self.scales[1] + x * by


def test_floats_that_belong_to_a_program_are_numbers() -> None:
    """They are traced as constants, and no kernel reads them; one that changes becomes an input, as arguments are."""
    torch._dynamo.reset()
    backend, model = Backend(Options(strict=True)), Scaled()
    traced: list[torch.fx.GraphModule] = []

    def traces(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        traced.append(graph)
        return backend(graph, inputs)

    ours = torch.compile(model, backend=traces, dynamic=True)
    for length, by in ((5, 0.25), (9, 0.75), (12, -1.5)):
        x = rows(3, length)
        torch.testing.assert_close(ours(x, by), model(x, by))
    assert len(traced) == 1
    (kernel,) = backend.reports[0].kernels
    assert kernel.source.count("const double *") == 1  # the argument
    for model.scales[1] in (4.0, 5.0, 6.5):
        torch.testing.assert_close(ours(x, 2.0), model(x, 2.0))
    assert len(traced) == 2
    model.eps = 0.125
    torch.testing.assert_close(ours(x, 2.0), model(x, 2.0))


def test_floats_that_belong_to_a_program_are_guarded_as_they_are() -> None:
    """The guard of a symbol would create a tensor from the float at each call; a change is noticed without one."""
    torch._dynamo.reset()
    model = Scaled()
    ours = torch.compile(model, backend=Backend(Options(strict=True)), dynamic=True)
    for model.eps in (0.5, 0.125):
        for length in (5, 9):
            x = rows(3, length)
            torch.testing.assert_close(ours(x, 2), model(x, 2))
    first = _debug_get_cache_entry_list(Scaled.forward.__code__)[-1]
    guards = str(first.guard_manager)
    assert "EQUALS_MATCH: L['self'].eps == 0.5" in guards and "as_tensor(" not in guards


def last_third(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    y = x.clone()
    y[-(n // 3) :] *= 2
    y[-(n // 2) : -1] += 1
    return y


PARTS: dict[str, Program] = {
    "last half": lambda x: x[-(x.shape[0] // 2) :] * 2,
    "last half, rounded up": lambda x: x[-x.shape[0] // 2 :] * 2,
    "last quarter, rounded up": lambda x: x[-math.ceil(x.shape[0] / 4) :] * 2,
    "both from the end": lambda x: x[-(x.shape[0] // 2) : -(x.shape[0] // 4)] * 2,
    "either from the end": lambda x: x[x.shape[0] - 11 : x.shape[0] - 7] * 2,
    "around the middle": lambda x: x[x.shape[0] // 3 : 2 * (x.shape[0] // 3)] * 2,
    "written": last_third,
    "rolled": lambda x: x.roll((-(x.shape[0] // 3), 1), (0, 1)) * x.roll(5),
    "rolled by a size": lambda x: (torch.ones(7, 3) + x[:7]).roll(x.shape[0], 0) * 2,
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_begin_or_end_at_computed_positions(name: str) -> None:
    f, backend = PARTS[name], Backend(Options(strict=True))
    compiled = torch.compile(f, backend=backend, dynamic=True)
    for length in (12, 9, 17, 8):
        x, y = (normal(length, 3).requires_grad_() for _ in range(2))
        expected, got = f(x), compiled(y)
        torch.testing.assert_close(got, expected)
        for result in (expected, got):
            (result * torch.linspace(0, 1, result.numel()).view(result.shape)).sum().backward()
        torch.testing.assert_close(y.grad, x.grad)


NUMBERS: dict[str, Program] = {
    "bounded": lambda x: x * min(1.0, 8 / x.shape[0]) + max(1.5, x.shape[0] / 3, x.shape[0] ** 0.5),
    "functions": lambda x: (
        x * math.log2(x.shape[0]) + math.sin(x.shape[0]) + math.cos(x.shape[0] / 2) + math.tanh(1 / x.shape[0])
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_real_numbers_that_are_computed_of_sizes(name: str) -> None:
    f, backend = NUMBERS[name], Backend(Options(strict=True))
    compiled = torch.compile(f, backend=backend, dynamic=True)
    for length in (3, 5, 8, 9, 12):
        x = normal(length)
        torch.testing.assert_close(compiled(x), f(x))
    assert len(backend.reports) == 1


def test_numbers_that_are_computed_of_sizes_and_are_no_size() -> None:
    """The first visible position of a sliding window, added to positions."""
    backend = Backend(Options(strict=True))

    def f(x: torch.Tensor) -> Tensors:
        first = max(x.shape[0] - 7, 0)
        return torch.arange(x.shape[0]) + first, x * first

    compiled = torch.compile(f, backend=backend, dynamic=True)
    for length in (5, 6, 9, 12):
        x = normal(length)
        for got, expected in zip(compiled(x), f(x), strict=True):
            torch.testing.assert_close(got, expected)
    assert len(backend.reports) == 1


def test_sizes_that_are_rounded_quotients() -> None:
    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x[:, None], scale_factor=1.5, mode="nearest").relu()[:, 0] + 1

    ours, reports = fused(resized, True)
    for batch, length in ((3, 10), (2, 7), (4, 13)):
        x = rows(batch, length)
        torch.testing.assert_close(ours(x), resized(x))
    assert forwards(reports) == 1


def test_pairs_of_any_number_of_rows() -> None:
    compiled = torch.compile(F.pdist, backend=Backend(Options(strict=True)), dynamic=True)
    for length in (5, 9, 30):
        x, y = (normal(length, 7).requires_grad_() for _ in range(2))
        expected, got = F.pdist(x), compiled(y)
        torch.testing.assert_close(got, expected)
        for result in (expected, got):
            (result * torch.linspace(0, 1, result.numel())).sum().backward()
        torch.testing.assert_close(y.grad, x.grad)
