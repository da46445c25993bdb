"""A slice of PyTorch's own table of operations through the compiler, forward and backward, against eager.

The slice is every n-th of each kind of operation in the table (unary, binary, reductions, shapes, …), in its order;
nothing is selected by whether it passes.  All of the table: `python -m benchmarks opinfo`.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's table of operations needs expecttest")

from torch.testing._internal import common_utils
from torch.testing._internal.opinfo.core import SampleInput

from benchmarks.opinfo import calls, verdict
from benchmarks.opinfo.errors import exact
from benchmarks.opinfo.pairs import Pair, pairs, samples
from benchmarks.opinfo.table import Record, report
from benchmarks.opinfo.verdict import Verdict, judge

WIDE, NARROW = 40, 120
"""One operation of this many is run by the evaluator, one of this many is compiled by the C target."""

KNOWN: dict[tuple[str, str], str] = {}
"""(operation, dtype) → why it fails."""


@pytest.fixture(autouse=True)
def _no_test_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterators over samples look through the stack, and the source of each frame, for a `unittest` to name."""
    monkeypatch.setattr(common_utils, "extract_test_fn", lambda: None)


def every(step: int, dtypes: tuple[str, ...]) -> list[object]:
    """One pair of `step` of each kind of operation, the first of each kind among them."""
    kinds: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs(dtypes, "cpu"):
        kinds[f"{type(pair.op).__name__} {pair.dtype}"].append(pair)
    chosen = [pair for members in kinds.values() for pair in members[::step]]
    return [
        pytest.param(
            pair,
            id=f"{pair.name}-{pair.dtype}",
            marks=[pytest.mark.xfail(reason=KNOWN[pair.name, pair.dtype], strict=True)]
            if (pair.name, pair.dtype) in KNOWN
            else [],
        )
        for pair in chosen
    ]


@pytest.mark.parametrize("pair", every(WIDE, ("float32", "bfloat16")))
def test_by_the_evaluator(pair: Pair):
    result = judge(pair, "cpu", count=1, target="reference")
    assert result.status in ("pass", "skipped"), result.reason


@pytest.mark.parametrize("pair", every(NARROW, ("float32",)))
def test_compiled(pair: Pair):
    result = judge(pair, "cpu", count=1)
    assert result.status in ("pass", "skipped"), result.reason


# The judge itself -----------------------------------------------------------------------------------------------------


def pair_of(name: str, dtype: str = "float32") -> Pair:
    (result,) = pairs([dtype], "cpu", f"{name}$")
    return result


def test_native_operations_leave_nothing_to_the_library():
    result = judge(pair_of("sigmoid"), "cpu", count=1, target="reference")
    assert result.native and result.samples > 1 and not result.random
    result = judge(pair_of("sort"), "cpu", count=1, target="reference")
    assert result.status == "pass" and not result.native and "aten.sort" in "".join(result.externs)


def test_a_wrong_number_is_a_mismatch(monkeypatch):
    def slightly_off(call, backward, target):
        result = calls.run(call, call.tensors, backward)
        result.outputs[0] = result.outputs[0] * (1 + 1e-4)
        return result

    monkeypatch.setattr(verdict, "compiled", slightly_off)
    result = judge(pair_of("exp"), "cpu", count=1)
    assert result.status == "mismatch" and "result 0" in result.reason


def test_a_wrong_gradient_is_a_mismatch(monkeypatch):
    def no_gradient(call, backward, target):
        result = calls.run(call, call.tensors, backward)
        result.grads = [None if grad is None else torch.zeros_like(grad) for grad in result.grads]
        return result

    monkeypatch.setattr(verdict, "compiled", no_gradient)
    assert "gradient 0" in judge(pair_of("exp"), "cpu", count=1).reason


def test_float64_gradients_use_the_same_numbers():
    pair = pair_of("neg", "float16")
    sample = samples(pair, "cpu", 1, True)[0]
    expected = calls.run(call := calls.Call(pair.op, sample), call.tensors, True)
    actual = exact(pair, sample, True, expected)
    assert actual is not None and torch.equal(actual.grads[0], expected.grads[0].double())


def test_16_bit_floats_have_pytorchs_tolerance_of_the_operation(monkeypatch):
    def off_by_two_units(call, backward, target):
        result = calls.run(call, call.tensors, backward)
        result.outputs[0] = result.outputs[0] * (1 - 2**-9)
        return result

    monkeypatch.setattr(verdict, "compiled", off_by_two_units)
    verdicts = [
        judge(pair_of(f"nn.functional.{name}", "float16"), "cpu", count=1).status
        for name in ("triplet_margin_with_distance_loss", "mse_loss")
    ]
    assert verdicts == ["pass", "mismatch"]


def test_eager_may_be_near_float64_by_chance(monkeypatch):
    """The difference of two equal distances is exact; for other inputs each distance is rounded."""
    anchor, other = torch.zeros(5, 10, dtype=torch.float16), torch.full((5, 10), 20.3, dtype=torch.float16)
    sample = SampleInput(anchor, args=(other, other.clone()))

    def status(share):
        def off(call, backward, target):
            result = calls.run(call, call.tensors, backward)
            result.outputs[0] = result.outputs[0] * (1 - share)
            return result

        monkeypatch.setattr(verdict, "compiled", off)
        return judge(pair_of("nn.functional.triplet_margin_loss", "float16"), "cpu", backward=False).status

    monkeypatch.setattr(verdict, "samples", lambda *of: [sample])
    assert [status(share) for share in (2**-9, 2**-3)] == ["pass", "mismatch"]


def test_a_failure_is_an_error_and_its_cause_is_named(monkeypatch):
    def broken(call, backward, target):
        raise ValueError("no such thing")

    monkeypatch.setattr(verdict, "compiled", broken)
    result = judge(pair_of("exp"), "cpu", count=1)
    assert result.status == "error" and "ValueError: no such thing" in result.reason


def test_other_strides_are_a_mismatch(monkeypatch):
    def turned(call, backward, target):
        result = calls.run(call, call.tensors, backward)
        result.outputs = [out.mT.contiguous().mT if out.ndim > 1 else out for out in result.outputs]
        return result

    monkeypatch.setattr(verdict, "compiled", turned)
    assert "strides" in judge(pair_of("softmax"), "cpu", count=3).reason


def test_strides_of_eager_are_right_if_the_trace_has_others(monkeypatch):
    """A dropout that drops nothing returns its input in eager; PyTorch's trace has a copy of it."""
    sample = SampleInput(torch.randn(5, 10)[:, ::2], kwargs={"p": 0.0, "training": True})
    monkeypatch.setattr(verdict, "samples", lambda *of: [sample])
    result = judge(pair_of("nn.functional.dropout"), "cpu")
    assert result.status == "pass" and result.samples == 1


def test_of_equal_elements_either_may_be_named(monkeypatch):
    def the_other(change):
        def otherwise(call, backward, target):
            result = calls.run(call, call.tensors, backward)
            values, positions = result.outputs
            result.outputs = [values, change(positions, call.tensors[0], values)]
            return result

        monkeypatch.setattr(verdict, "compiled", otherwise)
        return judge(pair_of("topk", "int64"), "cpu", count=1).status

    def last_equal(positions, source, values):
        if values.ndim != 3:
            return positions
        equal = source.unsqueeze(-2) == values.unsqueeze(-1)
        last = source.shape[-1] - 1 - equal.flip(-1).int().argmax(-1)
        again = (values.unsqueeze(-1) == values.unsqueeze(-2)).sum(-1) > 1
        return torch.where(again, positions, last)

    assert the_other(last_equal) == "pass"
    assert the_other(lambda positions, source, values: positions * 0) == "mismatch"
    assert the_other(lambda positions, source, values: (positions + 1) % source.shape[-1]) == "mismatch"


def test_a_gradient_goes_to_the_element_that_was_named():
    source = torch.tensor([1.0, 3.0, 2.0, 3.0], requires_grad=True)
    call = calls.Call(pair_of("topk").op, SampleInput(source, args=(1,)))
    theirs = calls.run(call, call.tensors, True)
    weight = theirs.grads[0].sum()
    for named, gone_to in ((1, 1), (3, 3), (1, 3), (3, 1), (0, 0)):
        gradient = torch.zeros(4).index_fill(0, torch.tensor([gone_to]), float(weight))
        ours = calls.Run([theirs.outputs[0], torch.tensor([named])], [gradient])
        judged = verdict._by_eagers_choice(ours, theirs, call)
        right = all(torch.equal(a, b) for a, b in zip(judged.grads, theirs.grads, strict=True))
        assert right == ((named == gone_to and named != 0) or gone_to == int(theirs.outputs[1]))


def test_of_equally_frequent_elements_each_is_right():
    """Eager returns the smallest on a CPU, and another one on a GPU."""
    source = torch.tensor([[5, 2, 5, 2, 9]])
    call = calls.Call(pair_of("mode", "int64").op, SampleInput(source, args=(1,)))
    theirs = calls.run(call, call.tensors, False)
    for element, position in ((2, 1), (5, 2), (5, 3), (9, 4)):
        ours = calls.Run([torch.tensor([element]), torch.tensor([position])], [])
        judged = verdict._by_eagers_choice(ours, theirs, call)
        right = all(torch.equal(a, b) for a, b in zip(judged.outputs, theirs.outputs, strict=True))
        assert right == ((element, position) in ((2, 1), (5, 2)))


def test_random_operations_are_compared_by_form():
    result = judge(pair_of("randn_like"), "cpu", count=1, target="reference")
    assert result.status == "pass" and result.random and result.native


def test_results_that_two_seeds_seldom_change_are_random():
    def one_in_a_million(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand(()) < 1e-6, x, -x)

    for function, random in ((one_in_a_million, True), (torch.neg, False)):
        call = calls.Call(SimpleNamespace(op=function), SampleInput(torch.ones(3)))
        assert calls.aot_eager(call, False)[1] is random


def test_a_record_is_resumed(tmp_path):
    first = Record(tmp_path / "verdicts.jsonl")
    first.begin(pair_of("exp"))
    first.add(Verdict("exp", "float32", samples=3))
    first.begin(pair_of("sin"))
    again = Record(tmp_path / "verdicts.jsonl")
    assert not again.wants(pair_of("exp")) and again.wants(pair_of("cos"))
    assert again.verdicts["sin", "float32"].reason == "took the process down"
    lines = report(list(again.verdicts.values()))
    assert lines[1].split()[:5] == ["float32", "2", "1", "0", "1"]
    assert "sin" in lines[2]
