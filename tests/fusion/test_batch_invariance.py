"""Batch-invariant numerics: a row has the same bits in every batch, with any number of threads, fused or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.lowering.errors import FusionError

Program = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


WIDE, NARROW, ODD, BIAS = drawn(256, 512) / 16, drawn(512, 256) / 16, drawn(1000, 33), drawn(512)


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], 4, -1).transpose(1, 2)


def attended(x: Tensor) -> Tensor:
    q = heads(x)
    return (q @ q.transpose(-1, -2) / 8).softmax(-1) @ q


PROGRAMS: dict[str, tuple[Program, tuple[int, ...]]] = {
    # name: (program of a batch, the shape of one of its elements)
    "softmax": (lambda x: x.softmax(-1), (257,)),
    "long log_softmax": (lambda x: x.log_softmax(-1), (20_011,)),
    "sum": (lambda x: x.sum(-1), (1000,)),
    "short sum": (lambda x: x.sum(-1) * 2, (33,)),
    "sum in parts": (lambda x: x.exp().sum(-1), (200_003,)),
    "variance": (lambda x: x.var(-1), (1000,)),
    "norm": (lambda x: x.norm(dim=-1), (4099,)),
    "product of numbers": (lambda x: (x * 0.1 + 1).prod(-1), (777,)),
    "layer norm and gelu": (lambda x: F.gelu(F.layer_norm(x, (768,))) * 2 + x, (768,)),
    "rms norm": (lambda x: F.rms_norm(x, (33,)), (33,)),
    "group norm": (lambda x: F.group_norm(x, 4), (16, 7, 9)),
    "sums along both": (lambda x: (x.sum(-1), (x * x).sum(-1), x.sum(1)), (50, 60)),
    "scan": (lambda x: x.cumsum(-1), (3000,)),
    "dot products": (lambda x: F.cosine_similarity(x[:, 0], x[:, 1], dim=-1), (2, 1000)),
    "mean of pixels": (lambda x: x.mean((-1, -2)), (8, 50, 64)),
    "losses": (lambda x: F.cross_entropy(x, x[:, 0].long() * 0, reduction="none"), (5000,)),
    "linear": (lambda x: F.gelu(x @ WIDE.to(x) + BIAS.to(x)), (256,)),
    "odd linear": (lambda x: x @ ODD.to(x), (1000,)),
    "linear of sequences": (lambda x: x @ WIDE.to(x), (7, 256)),
    "two linears": (lambda x: F.gelu(x @ WIDE.to(x)) @ NARROW.to(x) + x, (256,)),
    "norm and linear": (lambda x: F.layer_norm(x, (256,)) @ WIDE.to(x), (256,)),
    "scaled and linear": (lambda x: (x * 0.3).relu() @ WIDE.to(x), (256,)),
    "linear and softmax": (lambda x: (x @ WIDE.to(x)).softmax(-1), (256,)),
    "product of batches": (lambda x: x @ x.transpose(-1, -2), (37, 64)),
    "attention written out": (attended, (37, 64)),
}

BATCHES = (1, 2, 3, 8, 33)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def parts(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_row_has_the_same_bits_in_every_batch(name: str, dtype: torch.dtype) -> None:
    program, shape = PROGRAMS[name]
    batch = drawn(max(BATCHES), *shape).to(dtype)
    options = {"numerics": "batch_invariant", "strict": True}
    torch.set_num_threads(2)
    first = fusion.fuse(program, dynamic=False, options=options)
    expected = parts(first(batch))
    assert fusion.report(first).kernels and not fusion.report(first).externs
    if dtype is torch.float32:
        torch.testing.assert_close(expected, parts(program(batch)), rtol=1e-3, atol=1e-4)
    for count in (1, 2):
        torch.set_num_threads(count)
        torch._dynamo.reset()
        static = fusion.fuse(program, dynamic=False, options=options)
        symbolic = fusion.fuse(program, options=options)
        for rows in (5, 4):  # the second size makes the number of rows symbolic
            symbolic(batch[:rows])
        for rows in BATCHES:
            for compiled in (static, symbolic):
                for got, whole in zip(parts(compiled(batch[:rows])), expected, strict=True):
                    assert torch.equal(got, whole[:rows]), (rows, count, compiled is static)


def test_library_calls_are_noted() -> None:
    fused = fusion.fuse(lambda x, w: F.conv2d(x, w).relu(), options={"numerics": "batch_invariant"})
    fused(drawn(2, 3, 8, 8), drawn(4, 3, 3, 3))
    assert "may depend on the batch: aten.convolution.default" in str(fusion.report(fused))


def test_segments_are_left_to_the_library() -> None:
    """Compared with all elements, those of a segment would be added in an order that depends on the ones before it."""

    def summed(x: Tensor, lengths: Tensor) -> Tensor:
        return torch.segment_reduce(x, "sum", lengths=lengths, axis=0) * 2

    for numerics, calls in (("strict", 0), ("batch_invariant", 1)):
        torch._dynamo.reset()
        fused = fusion.fuse(summed, options={"numerics": numerics})
        fused(drawn(10), torch.tensor([3, 7]))
        assert str(fusion.report(fused)).count("aten.segment_reduce.default:") == calls, fusion.report(fused)


def test_a_saved_program_is_invariant_too(tmp_path: Path) -> None:
    x = drawn(33, 256)

    def layer(x: Tensor) -> Tensor:
        return (x @ WIDE).softmax(-1)

    options = {"numerics": "batch_invariant"}
    for rows in (1, 33):
        fusion.save(layer, tmp_path / f"{rows}.fusion", inputs=(x[:rows],), options=options)
    alone, whole = (fusion.load(tmp_path / f"{rows}.fusion") for rows in (1, 33))
    expected = fusion.fuse(layer, options=options)(x)
    assert torch.equal(whole(x), expected) and torch.equal(alone(x[:1]), expected[:1])


@pytest.mark.parametrize(("target", "device"), [(None, "meta"), ("reference", "cpu")])
def test_targets_without_invariant_kernels_are_refused(target: str | None, device: str) -> None:
    torch._dynamo.reset()
    fused = fusion.fuse(lambda x: x + 1, options={"numerics": "batch_invariant", "target": target})
    with pytest.raises(Exception, match="needs the target c or triton") as raised:
        fused(torch.ones(3, device=device))
    causes = [raised.value, raised.value.__cause__, getattr(raised.value, "inner_exception", None)]
    assert any(isinstance(cause, FusionError) for cause in causes)
