"""Split loops: how partial results are merged, when loops are split, and decoding end to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch

import fusion
from fusion.codegen.c import device
from fusion.codegen.c.target import CTarget
from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.blocks import Blocked, programs
from fusion.lowering.indexing import substitute_all
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Loop, Role, Store
from fusion.lowering.verify import verify_kernel
from fusion.schedule.chained.occupancy import length_of_part
from fusion.schedule.kernels import KernelCall
from fusion.schedule.online.merge import contribution, merged_op
from fusion.schedule.overrides import Overrides
from tests.codegen.triton.blocking import block
from tests.fusion.agreement import assert_as_eager
from tests.fusion.schedule.folds import COLUMN, COLUMNS, F64, LENGTH, ROW, ROWS, Body, Folds, S
from tests.fusion.schedule.online_bodies import attention
from tests.fusion.schedule.online_loops import _param, chained, inputs, kernel_of, loop_by_loop
from tests.fusion.schedule.test_online import ACCUMULATORS, DIFFERENCES
from tests.fusion.schedule.test_quantised import calls

# What is merged -------------------------------------------------------------------------------------------------------

PARTS = 3
P = sympy.Symbol("p", integer=True, nonnegative=True)


def in_parts(folds: Folds, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the last of `folds`: accumulators for parts of the axis in one kernel, merged in another."""
    accumulators, value, _ = chained(folds)
    length = LENGTH // PARTS
    sizes = {ROW: ROWS, COLUMN: COLUMNS, P: PARTS, S: length}
    symbols = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
    inner = []
    for fold in accumulators:
        *args, carry = substitute_all([*fold.args, fold.carry or fold.ref], {S: P * length + S}, symbols)
        inner.append(replace(fold, args=tuple(args), carry=carry if fold.carry is not None else None))
    at = (PARTS * COLUMNS) * ROW + PARTS * COLUMN + P
    base = kernel_of((), accumulators[0].ref, F64, F64)
    workspace = [_param(fold.name, fold.dtype, (ROWS, COLUMNS, PARTS), True) for fold in accumulators]
    body = (Loop((S,), tuple(inner)), *(Store(fold.name, at, fold.ref) for fold in accumulators))
    first = Kernel("parts", (*base.params[:-1], *workspace), (), _axes(symbols, Role.LOOP), body)
    verify_kernel(first)
    kept = [torch.full((ROWS, COLUMNS, PARTS), 7.0, dtype=F64) for _ in workspace]
    run_kernel(first, [*given.values(), *kept])

    parts = {fold.name: Load(fold.name, (at,), fold.dtype) for fold in accumulators}
    wholes = {fold.name: fold.ref for fold in accumulators}
    merged = [Fold(f.name, merged_op(f), (contribution(f, parts, wholes),), (P,), f.dtype) for f in accumulators]
    params = (*(replace(param, written=False) for param in workspace), *base.params)
    store = Store("out", COLUMNS * ROW + COLUMN, value)
    axes = tuple(axis for axis in _axes(symbols, Role.WHOLE) if axis.symbol != S)
    second = Kernel("merge", params, (), axes, (*merged, store))
    verify_kernel(second)
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=F64)
    run_kernel(second, [*kept, *given.values(), out])
    return out


def _axes(sizes: dict[sympy.Symbol, sympy.Integer], looped: Role) -> tuple[KernelAxis, ...]:
    roles = {ROW: Role.GRID, COLUMN: Role.GRID, P: Role.GRID if looped is Role.LOOP else looped, S: looped}
    return tuple(KernelAxis(symbol, size, roles[symbol]) for symbol, size in sizes.items())


@pytest.mark.parametrize("special", ["", "rising", "low", "masked", "infinite", "nan"])
@pytest.mark.parametrize("body", ACCUMULATORS, ids=lambda body: body.__name__)
def test_merged_parts_equal_the_unsplit_fold(body: Callable[[Body], Folds], special: str) -> None:
    """Also where one part is fully masked out (its maximum is -inf), and where all parts are."""
    folds, given = body(Body()), inputs(special)
    want, got = loop_by_loop(folds, given), in_parts(folds, given)
    size = max(1.0, float(want[want.isfinite()].abs().max())) if want.isfinite().any() else 1.0
    if body in DIFFERENCES:  # of infinite sums, where the sum of differences is NaN
        assert torch.equal(got.isfinite(), want.isfinite())
        got, want = got[want.isfinite()], want[want.isfinite()]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 * size, equal_nan=True)


def test_a_fully_masked_part_contributes_nothing() -> None:
    """Of row 1 the first part is masked out, of row 2 the last one, of row 0 all of them."""
    got = in_parts(attention(Body()), inputs("masked"))
    assert got[1:].isfinite().all() and got[0].isnan().all()


@pytest.mark.parametrize(("size", "parts"), [(4096, 16), (4099, 16), (300, 7), (64, 64)])
def test_parts_cover_the_axis(size: int, parts: int) -> None:
    length = length_of_part(sympy.Integer(size), parts)
    n = sympy.Symbol("n", integer=True, positive=True)
    assert length * parts >= size
    assert length_of_part(n, parts).xreplace({n: sympy.Integer(size)}) * parts >= size


def bent_gradients(
    dy: torch.Tensor, down: torch.Tensor, h: torch.Tensor, up: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Of an MLP with GELU on an image with channels last: of its input, of the weight before GELU, of its bias."""
    bent = torch.ops.aten.gelu_backward((dy.flatten(0, 2) @ down).view(h.shape), h).flatten(0, 2)
    return bent @ up, bent.T @ x.flatten(0, 2), bent.sum(0, dtype=torch.float32)


def loops_of_an_image(side: int, width: int) -> list[Blocked]:
    """Return the kernels with both products, for 64 square images with that number of channels."""
    image, inner = (64, side, side, width), (64, side, side, 4 * width)
    sizes = (image, (width, 4 * width), inner, (4 * width, width), image)
    given = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
    results = [block(call.kernel) for call in calls(bent_gradients, *given) if isinstance(call, KernelCall)]
    return [blocked for blocked in results if len(blocked.dots) == 2]


def test_whole_axes_are_priced_with_their_padding() -> None:
    """96 channels are held as 128: products computed twice of these took 500 µs of an H200, TorchInductor's 368."""
    assert not loops_of_an_image(56, 96)
    assert len(loops_of_an_image(56, 64)) == 2


def test_a_loop_with_digits_is_split_at_whole_blocks() -> None:
    """A point is a digit of the loop axis: 66 parts would be ragged, which takes another axis; 44 are not.

    Without parts, four programs would run all of the loop.
    """
    walks, target = loops_of_an_image(22, 64), TritonTarget("sm_90")
    assert len(walks) == 2 and all(programs(loop, target.configs(loop.kernel)[0]) > 90 for loop in walks)


# Decoding -------------------------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    return attend(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask)


def expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    batch, heads, _, width = q.shape
    there = k.shape[1]
    q = q.view(batch, there, heads // there, 1, width)
    mask = None if mask is None else mask[:, :, None]
    return attend(q, k[:, :, None], v[:, :, None], mask).reshape(batch, heads, 1, width)


def as_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    batch, heads, _, width = q.shape
    return attend(q.view(batch, k.shape[1], -1, width), k, v, mask).reshape(batch, heads, 1, width)


def decoding(
    heads: int, shared: int, keys: int, dtype: torch.dtype = torch.float32, batch: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One query for each head, and a cache of keys and values that is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, 1, 64, generator=generator).to(dtype)
    cache = torch.randn(2, batch, keys, shared, 64, generator=generator).to(dtype)
    return q, cache[0].transpose(1, 2), cache[1].transpose(1, 2)


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with more cores than a few heads keep busy."""
    monkeypatch.setattr(device, "assumed", lambda: device.EPYC)
    few = CTarget().capabilities
    monkeypatch.setattr(
        CTarget,
        "capabilities",
        property(lambda self: replace(few, parallelism=16, rates=replace(few.rates, launch_us=0.3))),
    )


def kernels(function: Callable[..., object], *args: object, target: str = "c") -> list[str]:
    """The kernels of `function`, which leaves nothing to the library."""
    explanation = fusion.explain(function, options={"target": target, "strict": True})(*args)
    assert not [extern for extern in explanation.externs if "mm" in str(extern)], str(explanation)
    return [kernel.source for kernel in explanation.kernels]


def check(function: Callable[..., torch.Tensor], *args: torch.Tensor, target: str = "c") -> None:
    fused = fusion.fuse(function, options={"target": target, "strict": True})
    exact = function(*(x.double() if x.dtype.is_floating_point else x for x in args))
    assert_as_eager(fused(*args), function(*args), exact)


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(
    ("keys", "dtype"), [(2048, torch.float16), (2111, torch.float32), (2111, torch.bfloat16)], ids=str
)
def test_decoding(keys: int, dtype: torch.dtype) -> None:
    """One kernel loops over parts of the keys, another merges them; 2111 is no multiple of a part."""
    given = decoding(4, 4, keys, dtype)
    loop, merge = kernels(attend, *given)
    assert "dot" in loop and "dot" not in merge
    check(attend, *given)


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("function", [repeated, expanded, as_rows], ids=lambda function: function.__name__)
def test_heads_that_share_keys_are_rows_of_a_tile(function: Callable[..., torch.Tensor]) -> None:
    given = decoding(8, 2, 4096, batch=2)
    loop, _ = kernels(function, *given, target="reference")
    scores = next(line for line in loop.splitlines() if " dot over " in line)
    assert "//4" not in scores and "rows none" not in scores, scores
    check(function, *given)


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("keys", [1024, 1500])
def test_masked_parts(keys: int) -> None:
    """Ragged lengths: in one batch most parts are masked out, in another all."""
    given = decoding(4, 2, keys, batch=3)
    lengths = torch.tensor([keys - 5, 70, 0]).view(3, 1, 1, 1)
    mask = torch.arange(keys).view(1, 1, 1, keys) < lengths
    check(repeated, *given, mask)


def with_symbolic_keys(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    for tensor in given[1:]:
        torch._dynamo.mark_dynamic(tensor, 2)
    return given


def test_a_symbolic_length_is_cut_by_its_hint() -> None:
    (loop, _) = kernels(attend, *with_symbolic_keys(decoding(8, 8, 4099)), target="reference")
    assert "loop  r0: 64*((s" in loop
    fused = fusion.fuse(attend, options={"target": "reference", "strict": True})
    for keys in (4099, 2048, 300, 70):
        given = with_symbolic_keys(decoding(8, 8, keys))
        assert_as_eager(fused(*given), attend(*given), attend(*(x.double() for x in given)))


def test_a_full_device_is_left_as_it_is() -> None:
    """On two cores, two heads are enough."""
    given = decoding(2, 2, 2048)
    assert len(kernels(attend, *given)) == 1 or torch.get_num_threads() > 2
    assert len(kernels(attend, *decoding(128, 128, 512), target="reference")) == 1


# Reductions that need one another -------------------------------------------------------------------------------------


def entropy(x: torch.Tensor) -> torch.Tensor:
    p = torch.softmax(x, -1)
    return -(p * torch.log_softmax(x, -1)).sum(-1)


LONG_ROWS = {
    "softmax": (lambda x: torch.softmax(x, -1), 3),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), 3),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), 2),
    "of columns": (lambda x: torch.softmax(x.T, 0), 3),
}


@pytest.mark.parametrize("length", [1 << 17, 131_101])
@pytest.mark.parametrize("name", LONG_ROWS)
def test_few_long_rows(name: str, length: int) -> None:
    """One kernel computes the maximum and the sum of exponentials of a part, which it reads once."""
    function, count = LONG_ROWS[name]
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(0))
    x[0, : length // 2] = -float("inf")  # many parts are nothing but that
    x[1] = -float("inf")
    x[2, 7] = 50.0
    result = kernels(function, x, target="reference")
    assert len(result) == count, result
    check(function, x, target="reference")


def test_an_entropy_of_long_rows() -> None:
    check(entropy, torch.randn(2, 1 << 18, generator=torch.Generator().manual_seed(0)) + 30, target="reference")


def test_parts_that_nothing_reads_are_no_kernels() -> None:
    """The mean of a group is needed in its parts alone: without fusion, to merge it is a kernel without results."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4, weight))

    options = fusion.Options(target="triton", strict=True, graph_cache=False)
    backend = fusion.Backend(options, None, Overrides(fused=False, evaluated=True))
    x, weight = torch.randn(2, 8, 128, 128, requires_grad=True), torch.randn(8, requires_grad=True)
    result = torch.compile(norm, backend=backend)(x, weight)
    assert torch.allclose(result, norm(x.double(), weight.double()).float(), atol=1e-5)
    kernels = [kernel.name for report in backend.reports for kernel in report.kernels]
    assert any("part" in name for name in kernels)
