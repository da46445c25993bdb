"""Random programs through `fuse` against eager; many more: `python -m benchmarks random`."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import random_programs
from tests.random_programs import integers, models, pieces, sharing, templates
from tests.random_programs import judge as judging
from tests.random_programs.builder import Builder
from tests.random_programs.crash_guards import Survived
from tests.random_programs.faulty import PLAIN
from tests.random_programs.grammar import finished, generate, runs
from tests.random_programs.inputs import LAYOUTS, VALUES, Input
from tests.random_programs.judge import judge
from tests.random_programs.program import Program
from tests.random_programs.shrinking import smallest

SLOW = tuple(HealthCheck)
"""A program takes a second to compile: hypothesis must accept that, and does not shrink it (`smallest` does)."""


@pytest.mark.filterwarnings("ignore::UserWarning")  # eager's own, about what a random program does
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=SLOW,
    phases=(Phase.generate,),
)
@given(st.randoms(use_true_random=False))
def test_a_random_program_agrees_with_eager(rng: random.Random) -> None:
    program = generate(rng, 0)
    verdict = judge(program)
    assert verdict.status == "pass", f"{verdict.reason}\n{program}"


# The grammar -------------------------------------------------------------------------------------------------------

TABLES = ("ARITHMETIC", "FUNCTIONS", "CHOICES", "REDUCTIONS", "NORMS", "VIEWS", "ASSEMBLIES", "GATHERS", "SCANS")
PIECES = ("NUMBERS", "LAYERS", "ATTENTION", "LOSSES", "IMAGES", "ORDERS")
MODELS = ("CACHES", "EXPERTS", "PLACES", "MASKS", "PARTS", "FORMATS", "MIXED")


def entered(seed: int) -> Builder:
    builder = Builder(random.Random(seed), {"A": 4, "B": 6}, seed, grads=False, odd=False)
    for dims in (("A", "B"), ("A", "A", "B"), ("B",), ("B", "B"), ("A", "A", "B", "B")):
        builder.input(dims)
        builder.input(dims)
    return builder


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*TABLES, *PIECES, *MODELS, "MUTATIONS", "INTEGERS"])
def test_eager_takes_every_entry_of_a_table(name: str) -> None:
    file = pieces if name in PIECES else models if name in MODELS else templates
    for entry in set(integers.INTEGERS if name == "INTEGERS" else getattr(file, name)):
        for seed in range(100):
            builder = entered(seed)
            text = templates.filled(builder, entry)
            if text and (builder.attempt(text, []) if name == "MUTATIONS" else builder.add(text)):
                break
        else:
            pytest.fail(f"no operands for {entry}")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("production", sharing.SHARING)
def test_statements_about_shared_memory_are_drawn_and_agree_with_eager(production) -> None:  # type: ignore[no-untyped-def]
    drawn = [builder for builder in map(entered, range(40)) if production(builder)]
    assert len({"\n".join(builder.statements) for builder in drawn}) > 5
    verdict = judge(finished(drawn[0]))
    assert verdict.status == "pass" and verdict.kernels, verdict.reason


def test_the_options_of_each_call_are_switched() -> None:
    call = {"A": 4}
    program = replace(PLAIN, calls=(call, {"A": 5}, call, call), options=({}, {"numerics": "strict"}))
    assert judge(program).status == "pass"
    again = eval(str(program), {"Program": Program, "Input": Input, "torch": torch})
    assert again.options == program.options
    assert len(judge(replace(program, options=({},))).externs) * 2 == len(judge(program).externs)


def test_a_backward_that_takes_eager_down_is_not_asked_for() -> None:
    def normed(layout: str, *, grad: bool) -> Program:
        x = Input("x0", (2, 5, 6, 4), torch.float32, grad=grad)
        source = f"return (F.group_norm(x0{layout}, 2, x1, x1, eps=0.1),)"
        return Program((x, Input("x1", (4,), torch.float32, grad=True)), source, ({},), backward=True)

    assert not runs(normed(".movedim(-1, 1)", grad=False))
    assert runs(normed(".movedim(-1, 1)", grad=True))
    assert runs(normed(".movedim(-1, 1).contiguous()", grad=False))


def test_attention_without_heads_that_takes_eager_down_is_not_drawn() -> None:
    def attention(heads: int) -> torch.Tensor:
        x = torch.ones(3, heads, 5, 4)
        result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)
        return result

    with Survived():
        assert attention(2).shape == (3, 2, 5, 4)
        with pytest.raises(RuntimeError, match="number of heads"):
            attention(0)


class _BatchNorms(TorchDispatchMode):
    """Counts backwards of batch norms, and requires operands per channel to be contiguous."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # not annotated in PyTorch
        if func is torch.ops.aten.native_batch_norm_backward.default:
            self.count += 1
            assert all(tensor is None or tensor.is_contiguous() for tensor in args[2:7])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["expanded", "stepped"])
def test_eager_is_asked_for_no_batch_norm_whose_weights_it_reads_at_other_places(layout: str) -> None:
    for entry in (entry for entry in pieces.LAYERS if "batch_norm" in entry):
        x0 = Input("x0", (2, 5, 4), torch.float32, grad=True)
        x1 = Input("x1", (4,), torch.float32, layout=layout)
        program = Program((x0, x1), f"return ({entry.format(f='x0', w='x1', w2='x1')},)", ({},), backward=True)
        with _BatchNorms() as norms:
            assert runs(program)
        assert norms.count == 1


def test_a_program_runs_whose_sizes_hang_on_numbers() -> None:
    """Inputs that no result needs are removed, which renumbers the inputs after them."""
    assert runs(generate(random.Random("5204/51"), 51))


def test_a_seed_always_gives_the_same_program_and_its_text_gives_it_back() -> None:
    program = generate(random.Random("1/2"), 2)
    assert generate(random.Random("1/2"), 2) == program
    again = eval(str(program), {"Program": Program, "Input": Input, "torch": torch})
    assert again.lines == program.lines
    assert replace(again, source="") == replace(program, source="")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5), (4, 1, 3)])
def test_numbers_do_not_depend_on_the_layout_of_their_copy(layout: str, shape: tuple[int, ...]) -> None:
    for values in VALUES:
        entry = Input("x", shape, torch.float16, layout, values)
        narrow, wide = entry.tensor({}, 3), entry.tensor({}, 3, wide=True)
        assert narrow.shape == shape and narrow.stride() == wide.stride()
        assert torch.equal(narrow.double().nan_to_num(7.0), wide.nan_to_num(7.0))


# The judge ---------------------------------------------------------------------------------------------------------


def test_a_failure_is_shrunk() -> None:
    program = Program(
        inputs=(Input("x0", ("A", 3), torch.float32, layout="transposed"), Input("x1", (3,), torch.float16)),
        source="""
            t0 = x0.exp()
            t1 = t0 + x1
            t2 = torch.sort(t1)[0]
            t3 = t2 * 2
            return (t1, t3,)
        """,
        calls=({"A": 7}, {"A": 9}),
        dynamic=True,
    )
    small = smallest(program, lambda candidate: "sort" in candidate.source)
    assert small.lines == ["t2 = torch.sort(y2)[0]", "return (t2,)"]
    assert small.calls == ({"A": 1},) and small.dynamic is None


# The runner --------------------------------------------------------------------------------------------------------


def test_a_late_program_is_counted_separately_with_its_position(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    def hangs(*arguments: object) -> judging.Verdict:
        while True:
            pass

    monkeypatch.setattr(random_programs, "judge", hangs)
    assert random_programs.main(["--only", "3", "--limit", "1", "--names"]) == 1
    said = capsys.readouterr().out
    assert "late 0/3: took more than 1 s in tests/random_programs/test_random_programs.py:" in said
    assert "1 run, 0 mismatches, 0 errors, 1 late, 0 not captured" in said


def test_excused_results_are_counted_and_named(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    verdicts = iter((judging.Verdict(excused=["call 0: one", "call 1: two"]), judging.Verdict("skipped", "three")))
    monkeypatch.setattr(random_programs, "judge", lambda *arguments: next(verdicts))
    assert random_programs.main(["--only", "3", "--names"]) == 0
    said = capsys.readouterr().out
    assert "excused 0/3: call 0: one\nexcused 0/3: call 1: two\n" in said
    assert "\n2 results excused, as PyTorch's capture gives the same, in 1 programs\n" in said
    random_programs.main(["--only", "4", "--names"])
    assert "not captured 0/4: three\n" in capsys.readouterr().out


def test_a_process_that_is_taken_down_leaves_its_last_words(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    begun = random_programs.Entry(0, judging.Verdict("error", "took the process down")).line()
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\necho '{begun}'\necho 'out of luck' >&2\nexit 3\n")
    worker.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(worker))
    assert random_programs.main(["--count", "1", "--names"]) == 1
    assert "error 0/0: took the process down (exit code 3): out of luck" in capsys.readouterr().out
