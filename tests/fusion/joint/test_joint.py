"""The joint graph: sums that are computed from smaller tensors, in form and in numbers, and sums that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

import fusion
from fusion.codegen.reference import ReferenceTarget
from fusion.compilation.autograd import aot_backend
from fusion.joint.factors import is_product, matrix_root, product_of, shape_of
from fusion.joint.reassociate import reassociate
from fusion.lowering.aten.attention import attention
from fusion.lowering.aten.decompositions import decompositions
from fusion.runner.contexts import Deriving, Joint
from fusion.runner.passes import PassLog, run_stage
from fusion.stages import JOINT
from tests.fusion import attentions
from tests.fusion.capabilities import of_everything

aten = torch.ops.aten
Function = Callable[..., object]

QUERIES, KEYS, WIDTH = 200, 220, 4
"""Six heads of these have scores enough to be recomputed, rather than kept."""


def fixed_dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(attentions.scores(q, k), -1) * kept * 1.25) @ v


def masked_weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.softmax(attentions.scores(q, k), -1).masked_fill(~kept, 0) @ v


def chosen_weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept, torch.softmax(attentions.scores(q, k), -1) / 0.8, 0.0) @ v


def dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.dropout(torch.softmax(attentions.scores(q, k), -1), 0.2, True) @ v


PROGRAMS: dict[str, tuple[Function, int]] = {
    # each with the heads of its keys and values
    "plain": (attentions.plain, 2),
    "causal": (attentions.causal, 2),
    "by hand": (attentions.by_hand, 2),
    "normalised last": (attentions.normalised_last, 2),
    "grouped": (attentions.grouped, 1),
    "fixed dropout": (fixed_dropout, 2),
    "masked weights": (masked_weights, 2),
    "chosen weights": (chosen_weights, 2),
}


def inputs(name: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    function, heads = PROGRAMS[name]
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2, QUERIES, WIDTH), (3, heads, KEYS, WIDTH), (3, heads, KEYS, WIDTH))
    results = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    results = [tensor.requires_grad_() for tensor in results]
    if function.__code__.co_argcount == 4:
        results.append(torch.rand(QUERIES, KEYS, generator=generator) < 0.8)
    return results


def joint_graph(
    function: Function, given: Sequence[torch.Tensor], *, dynamic: bool = False
) -> tuple[fx.GraphModule, list[object]]:
    """Return the partitioned graph of forward and backward, and real tensors (or sizes) for its inputs."""
    results: list[tuple[fx.GraphModule, list[object]]] = []

    def partition(joint: fx.GraphModule, args: Sequence[object], *, num_fwd_outputs: int, **others: object) -> object:
        with unset_fake_temporarily():
            results.append((joint, [_real(node.meta["val"]) for node in joint.graph.nodes if node.op == "placeholder"]))
        return min_cut_rematerialization_partition(joint, args, num_fwd_outputs=num_fwd_outputs, **others)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, decompositions=decompositions(), partition_fn=partition)
    with torch.random.fork_rng():
        torch.compile(function, backend=backend, dynamic=dynamic)(*given)
    return results[0]


def _real(val: object) -> object:
    if not isinstance(val, torch.Tensor):
        return val.node.hint  # type: ignore[attr-defined]  # a symbolic size
    sizes = [size if isinstance(size, int) else size.node.hint for size in val.shape]
    return torch.rand(sizes) < 0.8 if val.dtype is torch.bool else torch.randn(sizes).to(val.dtype)


def run(graph: fx.GraphModule, given: Sequence[object]) -> list[torch.Tensor]:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        result = fx.Interpreter(graph).run(*given, enable_io_processing=False)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def summed_sizes(graph: fx.GraphModule) -> list[int]:
    """The lengths of the last axes that backward sums over."""
    nodes = list(graph.graph.nodes)
    start = next(i for i, node in enumerate(nodes) if node.op == "call_function" and _sees_tangents(node))
    sums = [node for node in nodes[start:] if node.target is aten.sum.dim_IntList]
    return [int(node.args[0].meta["val"].shape[-1]) for node in sums if node.args[1][0] in (-1, 2, 3)]


def _sees_tangents(node: fx.Node) -> bool:
    return any("tangents" in arg.name for arg in node.all_input_nodes)


def check_values(graph: fx.GraphModule, given: Sequence[object]) -> None:
    """Check that dtypes and ranks of the nodes' metadata are those of their results."""

    class Checked(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            val = n.meta.get("val")
            if isinstance(result, torch.Tensor) and isinstance(val, torch.Tensor):
                assert result.dtype is val.dtype, n
                assert result.ndim == val.ndim, n
            return result

    Checked(graph).run(*given, enable_io_processing=False)
    graph.graph.lint()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_backward_of_an_attention_sums_over_its_width(name: str) -> None:
    graph, given = joint_graph(PROGRAMS[name][0], inputs(name))
    assert KEYS in summed_sizes(graph)
    before = run(graph, given)
    reassociate(graph)
    assert not any(_sums_products(node) for node in graph.graph.nodes if node.target is aten.sum.dim_IntList)
    assert WIDTH in summed_sizes(graph)
    check_values(graph, given)
    for got, want in zip(run(graph, given), before, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _sums_products(node: fx.Node) -> bool:
    """Is this a sum over keys that has a matrix product, or a sum that may contain one, as a factor?"""
    shape = shape_of(node.args[0])
    targets = {factor.root.target for factor in product_of(node.args[0], shape).over}
    return shape[-1] == KEYS and bool(targets & {aten.bmm.default, aten.add.Tensor})


def test_a_random_mask_is_a_factor_as_any_other() -> None:
    graph, given = joint_graph(dropout, inputs("plain"))
    before = run(graph, given)
    reassociate(graph)
    assert summed_sizes(graph) == [WIDTH]
    for got, want in zip(run(graph, given), before, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_sizes_may_be_symbols() -> None:
    given = inputs("plain")
    for tensor in given:
        torch._dynamo.mark_dynamic(tensor, 0)
    graph, real = joint_graph(attentions.plain, given)
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.graph.nodes)
    before = run(graph, real)
    reassociate(graph)
    assert summed_sizes(graph) == [WIDTH]
    for got, want in zip(run(graph, real), before, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_as_exact_as_eager(name: str, dtype: torch.dtype) -> None:
    function = PROGRAMS[name][0]
    given = [tensor.detach() for tensor in inputs(name, dtype)]
    exact = gradients(function, [t.double() if t.is_floating_point() else t for t in given])
    eager = gradients(function, given)
    torch._dynamo.reset()
    fused = gradients(fusion.fuse(function, options={"target": "reference", "strict": True}), given)
    for got, rounded, want in zip(fused, eager, exact, strict=True):
        assert error(got, want) <= 2 * error(rounded, want) + 1e-6


def test_gradients_of_similar_keys_are_as_exact_as_the_librarys() -> None:
    """Terms that cancel in a row of eager's gradients do not cancel in a sum computed from the output."""
    generator = torch.Generator().manual_seed(0)

    def alike() -> torch.Tensor:
        return torch.randn(8, 4, 1, 8, generator=generator) + 0.1 * torch.randn(8, 4, 96, 8, generator=generator)

    def library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    given = [alike(), alike(), alike()]
    exact = gradients(attentions.plain, [tensor.double() for tensor in given])
    fused = gradients(fusion.fuse(attentions.plain, options={"target": "reference", "strict": True}), given)
    for got, theirs, want in zip(fused, gradients(library, given), exact, strict=True):
        assert error(got, want) <= 1.5 * error(theirs, want)


@pytest.mark.parametrize("queries", [1, 16])
def test_gradients_for_equal_keys_of_few_queries_are_as_exact_as_eager(queries: int) -> None:
    """The exact gradients are 0: rounding errors have to cancel as far as they do in eager."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, queries, 64, generator=generator)
    k, v = (torch.randn(1, 1, 1, 64, generator=generator).expand(-1, -1, 1000, -1).contiguous() for _ in range(2))
    exact = gradients(attentions.plain, [tensor.double() for tensor in (q, k, v)])
    eager = gradients(attentions.plain, [q, k, v])
    fused = gradients(fusion.fuse(attentions.plain, options={"target": "c", "strict": True}), [q, k, v])
    for got, rounded, want in zip(fused, eager, exact, strict=True):
        assert error(got, want) <= error(rounded, want)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The root of the mean square: Y is rounded to a half where X·P was not, which single numbers may show."""
    return float((got - want).square().mean().sqrt())


def gradients(function: Function, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of q, k and v, in float64."""
    leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in given]
    result = function(*leaves)
    assert isinstance(result, torch.Tensor)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    result.backward(weights.to(result.dtype))
    return [leaf.grad.double() for leaf in leaves[:3] if leaf.grad is not None]


# Graphs written down --------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 480, 560
A, B, P, OTHER = (
    torch.randn(shape, dtype=torch.float64)
    for shape in ((ROWS, WIDTH), (COLUMNS, WIDTH), (ROWS, COLUMNS), (COLUMNS, WIDTH))
)
ROW = torch.rand(ROWS, 1, dtype=torch.float64) + 1


def summed(function: Function, *given: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a traced function, before and after reassociation."""
    before, after = (make_fx(function, tracing_mode="fake")(*given) for _ in range(2))
    reassociate(after)
    return before, after


def matmuls(graph: fx.GraphModule) -> int:
    return sum(node.target in (aten.mm.default, aten.bmm.default) for node in graph.graph.nodes)


TAKEN: dict[str, Function] = {
    "two factors": lambda a, b, p, r: (p @ b, (a @ b.t() * p).sum(-1)),
    "the other way": lambda a, b, p, r: (p @ b, (p * (a @ b.t())).sum(-1, keepdim=True)),
    "an axis from the front": lambda a, b, p, r: (p @ b, (p * (a @ b.t())).sum(1)),
    "scaled": lambda a, b, p, r: (p @ b, (-(a @ b.t()) * 3 * p / 2).sum(-1)),
    "scaled before": lambda a, b, p, r: ((p * 4) @ b, (a @ b.t() * p).sum(-1)),
    "a row in the summand": lambda a, b, p, r: (p @ b, (a @ b.t() / r * p * r * r).sum(-1)),
    "a row in both": lambda a, b, p, r: ((p / r) @ b, (a @ b.t() * (p / r) / r).sum(-1)),
    "a view between": lambda a, b, p, r: (
        p @ b,
        ((a @ b.t()).view(4, 120, COLUMNS) * p.view(4, 120, COLUMNS)).sum(-1),
    ),
    "a number for all": lambda a, b, p, r: (p @ b, (a @ b.t() * p * r.sum()).sum(-1)),
    "two terms": lambda a, b, p, r: (p @ b, p.sum(-1), ((a @ b.t() + r) * p).sum(-1)),
    "a difference": lambda a, b, p, r: (p @ b, p.sum(-1), (torch.sub(a @ b.t(), r, alpha=3) * p).sum(-1)),
    "a mask": lambda a, b, p, r: (torch.where(c := p > 0, p, 0) @ b, torch.where(c, a @ b.t() * p, 0).sum(-1)),
    "a mask that leaves zeros": lambda a, b, p, r: (
        torch.where(c := p > 0, p, torch.zeros_like(p)) @ b,
        torch.where(c, a @ b.t() * p, p.new_zeros(p.shape)).sum(-1),
    ),
    "a batch": lambda a, b, p, r: (
        (q := p.expand(3, -1, -1).exp()) @ (c := b.expand(3, -1, -1) * 2),
        (a.expand(3, -1, -1) @ c.mT * q).sum(-1),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken_from_a_smaller_tensor(name: str) -> None:
    before, after = summed(TAKEN[name], A, B, P, ROW)
    assert (matmuls(before), matmuls(after)) == (2, 1)
    for got, want in zip(after(A, B, P, ROW), before(A, B, P, ROW), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert got.is_contiguous() == want.is_contiguous()


LEFT: dict[str, Function] = {
    "another P": lambda a, b, p, o: (p.exp() @ b, (a @ b.t() * p).sum(-1)),
    "another B": lambda a, b, p, o: (p @ o, (a @ b.t() * p).sum(-1)),
    "B in another order": lambda a, b, p, o: (p @ b, (a @ b.view(WIDTH, COLUMNS) * p).sum(-1)),
    "another factor": lambda a, b, p, o: (p @ b, (a @ b.t() * p * p.exp()).sum(-1)),
    "a factor too few": lambda a, b, p, o: ((p * p.exp()) @ b, (a @ b.t() * p).sum(-1)),
    "another mask": lambda a, b, p, o: (
        torch.where(c := p > 0, p, 0) @ b,
        torch.where(c, 0, a @ b.t() * p).sum(-1),
    ),
    "over the other axis": lambda a, b, p, o: (p @ b, (a @ b.t() * p).sum(0)),
    "over both axes": lambda a, b, p, o: (p @ b, (a @ b.t() * p).sum((0, 1))),
    "Y too late": lambda a, b, p, o: ((a @ b.t() * p).sum(-1), p @ b),
    "no Y": lambda a, b, p, o: (p @ p.t(), (a @ b.t() * p).sum(-1)),
    "Y rounded more": lambda a, b, p, o: (p.bfloat16() @ b.bfloat16(), (a @ b.t() * p).sum(-1)),
    "P quantised": lambda a, b, p, o: (p.to(torch.float8_e4m3fn).double() @ b, (a @ b.t() * p).sum(-1)),
    "no product": lambda a, b, p, o: (p @ b, (a @ b.t() + p).sum(-1)),
    "half of two terms": lambda a, b, p, o: (p @ b, ((a @ b.t() + p.exp()) * p).sum(-1)),
    "rows that are split": lambda a, b, p, o: (p @ b, (a @ b.t() * p).view(ROWS, 4, 140).sum(-1)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    before, after = summed(LEFT[name], A, B, P, OTHER)
    assert [str(node.target) for node in after.graph.nodes] == [str(node.target) for node in before.graph.nodes]


def test_a_long_axis_is_left_alone() -> None:
    a, b = torch.randn(ROWS, 150), torch.randn(COLUMNS, 150)
    _, after = summed(TAKEN["two factors"], a, b, P.float(), ROW)
    assert matmuls(after) == 2


@pytest.mark.parametrize(("rows", "columns"), [(ROWS, COLUMNS // 2), (1, ROWS * COLUMNS)])
def test_products_of_the_library_are_unchanged(rows: int, columns: int) -> None:
    """The product has few elements, or no more than its operands."""
    a, b, p = torch.randn(rows, WIDTH), torch.randn(columns, WIDTH), torch.randn(rows, columns)
    _, after = summed(TAKEN["two factors"], a, b, p, torch.rand(rows, 1) + 1)
    assert matmuls(after) == 2


def test_factors_know_how_they_are_repeated() -> None:
    """p · r and p · rᵀ are not the same, nor is a mask per head one per query."""
    b, p, r = torch.randn(COLUMNS, WIDTH), torch.randn(COLUMNS, COLUMNS), torch.randn(COLUMNS)

    def across(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor, r: torch.Tensor) -> object:
        return (p * r) @ b, (a @ b.t() * (p * r[:, None])).sum(-1)

    _, after = summed(across, b, b, p, r)
    assert matmuls(after) == 2


def test_matrix_roots_see_through_views() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        y = x.unsqueeze(4).permute(0, 1, 4, 3, 2).permute(1, 4, 0, 3, 2).reshape(6, 5, 7)
        return y.transpose(1, 2).contiguous()

    graph = make_fx(turned, tracing_mode="fake")(torch.randn(1, 6, 5, 7))
    last = graph.graph.output_node().args[0]
    source = next(iter(graph.graph.nodes))
    assert matrix_root(last) == (source, True)


def test_new_nodes_have_the_metadata_of_the_node_they_replace() -> None:
    graph = make_fx(TAKEN["two factors"], tracing_mode="fake")(A, B, P, ROW)
    old = next(node for node in graph.graph.nodes if node.target is aten.sum.dim_IntList)
    old.meta.update(stack_trace='File "model.py", line 3', partitioner_tag="is_backward", seq_nr=4)
    known = set(graph.graph.nodes)
    reassociate(graph)
    fresh = [node for node in graph.graph.nodes if node not in known]
    assert fresh
    assert all((node.meta["partitioner_tag"], node.meta["seq_nr"]) == ("is_backward", 4) for node in fresh)
    assert all("model.py" in node.meta["stack_trace"] for node in fresh)


def kept_bytes(function: Function, given: Sequence[torch.Tensor]) -> int:
    """Return the bytes of memory that forward keeps for backward, beyond its inputs."""
    results: list[int] = []

    def compile_one(graph: fx.GraphModule, label: str) -> Callable[[list[object]], tuple[object, ...]]:
        def call(args: list[object]) -> tuple[object, ...]:
            before = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            traced = graph(*args)
            args.clear()
            kept = [part.untyped_storage() for part in traced[1:] if isinstance(part, torch.Tensor)]
            if label == "forward":
                results.append(
                    sum({each.data_ptr(): len(each) for each in kept if each.data_ptr() not in before}.values())
                )
            return tuple(traced)

        return call

    torch._dynamo.reset()
    torch.compile(function, backend=aot_backend(compile_one, of_everything))(*given).sum().backward()
    return results[0]


def in_heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values as parts of one product."""
    batch, length, width = x.shape
    q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in (x @ w).split(width, -1))
    return attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


def test_the_base_of_head_views_is_kept_instead_of_their_copies() -> None:
    batch, length, width = 2, 32, 8
    x = torch.randn(batch, length, width, requires_grad=True)
    w = torch.randn(width, 3 * width, requires_grad=True)
    statistics, result = 2 * batch * 2 * length, batch * length * width
    assert kept_bytes(in_heads, [x, w]) <= 4 * (3 * result + result + statistics)


def test_backward_recomputes_large_products_only_if_kernels_can_hold_products() -> None:
    able = ReferenceTarget().capabilities
    for chains in (False, True):
        capabilities = able if chains else replace(able, fold_ops=able.fold_ops - {"dot"})
        graph, _ = joint_graph(attentions.causal, inputs("causal"))
        run_stage(JOINT, Joint(graph, results=1), Deriving(capabilities), PassLog())
        products = [node for node in graph.graph.nodes if is_product(node)]
        marked = {node.meta.get("recompute") for node in products}
        assert (CheckpointPolicy.PREFER_RECOMPUTE in marked) is chains
        assert summed_sizes(graph) == [WIDTH if chains else KEYS]


@pytest.mark.parametrize(("length", "kept"), [(128, False), (127, False), (64, True)])
def test_scores_of_a_batch_are_recomputed_from_half_as_many_numbers(length: int, kept: bool) -> None:
    """As many scores as queries and keys, stored, are written once and read twice; the kernels hold them."""

    def scored(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).exp()

    q, k = (torch.randn(4 * (1 << 8), length, 128 if kept else 64, requires_grad=True) for _ in "qk")
    graph, _ = joint_graph(scored, [q, k])
    run_stage(JOINT, Joint(graph, results=1), Deriving(ReferenceTarget().capabilities), PassLog())
    scores = next(node for node in graph.graph.nodes if is_product(node))
    assert (scores.meta.get("recompute") is not CheckpointPolicy.PREFER_RECOMPUTE) is kept
