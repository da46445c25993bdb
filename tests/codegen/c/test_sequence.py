"""Sequences of launches on one team of threads: what they wait for, and how they end where a launch fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise

import pytest
import torch

from fusion.codegen.binary import Callee
from fusion.codegen.c.build import build_object
from fusion.codegen.c.calls import NO_MEMORY, Entry, entry_of, launcher_of
from fusion.codegen.c.sequence import in_argument, in_sequence, in_workspace, launched_in_sequence

SIZE = 60
"""The numbers of a tensor; one more counts launches in a parallel region."""

BODY = f"""\
    for (int i = {SIZE}*thread/threads; i < {SIZE}*(thread + 1)/threads; i++) to[i] = from[(i + 7) % {SIZE}] + 1;
"""

SOURCES = {
    # Each thread reads what another one wrote in the launch before.
    "divided": f"""\
#include <stdint.h>
int omp_get_thread_num(void);
int64_t divided_scratch(void) {{ return 64; }}
int divided_share(const int64_t *from, int64_t *to, char *scratch, int threads) {{
    const int thread = omp_get_thread_num();
    volatile int64_t *own = (int64_t *)scratch;
    *own = thread;
{BODY}
    return *own != thread;
}}
int divided(const int64_t *from, int64_t *to, int threads) {{
    const int thread = 0;
    threads = 1;
{BODY}
    return 0;
}}
""",
    "alone": f"""\
#include <stdint.h>
int omp_in_parallel(void);
int alone(const int64_t *from, int64_t *to, int threads) {{
    const int thread = 0;
    threads = 1;
{BODY}
    to[{SIZE}] += omp_in_parallel();
    return 0;
}}
""",
    "region": f"""\
#include <stdint.h>
int omp_in_parallel(void);
int region(const int64_t *from, int64_t *to, int threads) {{
    to[{SIZE}] += omp_in_parallel();
    #pragma omp parallel for num_threads(threads)
    for (int i = 0; i < {SIZE}; i++) to[i] = from[(i + 7) % {SIZE}] + 1;
    return 0;
}}
""",
    # The last thread fails, after the others.
    "failing": """\
#include <stdint.h>
int omp_get_thread_num(void);
int64_t failing_scratch(void) { return 0; }
int failing_share(const int64_t *from, int64_t *to, char *scratch, int threads) {
    const int thread = omp_get_thread_num();
    if (thread < threads - 1) return 0;
    for (volatile int i = 0; i < 10000; i++);
    return 1;
}
int failing(const int64_t *from, int64_t *to, int threads) { return 1; }
""",
    "failing_alone": """\
#include <stdint.h>
int failing_alone(const int64_t *from, int64_t *to, int threads) { return 1; }
""",
    "failing_region": """\
#include <stdint.h>
int failing_region(const int64_t *from, int64_t *to, int threads) {
    int wrong = 0;
    #pragma omp parallel num_threads(threads) reduction(|: wrong)
    wrong = 1;
    return wrong;
}
""",
    "large": """\
#include <stdint.h>
int64_t large_scratch(void) { return (int64_t)1 << 50; }
int large_share(const int64_t *from, int64_t *to, char *scratch, int threads) { return 0; }
int large(const int64_t *from, int64_t *to, int threads) { return 0; }
""",
}


@cache
def entry(name: str) -> Entry:
    callee = Callee(name, name, 2, 0)
    loaded = partial(launcher_of, callee=callee, failed=lambda args: IndexError(name), source=SOURCES[name])
    found = entry_of(build_object(SOURCES[name], name, loaded))
    assert found is not None
    return found


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def launched(names: Sequence[str], first: int = 0) -> tuple[tuple[int, int] | None, list[torch.Tensor]]:
    """Launch kernels, each on the result of the one before; return what failed, and the results.

    Every other tensor is in the workspace.
    """
    held = torch.full((len(names) + 1, SIZE + 1), -1)
    held[:, SIZE] = 0
    held[0] = first
    workspace = held.clone()
    size = held[0].nbytes
    places = [in_workspace(k * size) if k % 2 else in_argument(0, k * size) for k in range(len(names) + 1)]
    function = in_sequence()
    assert function is not None
    launch = launched_in_sequence(list(map(entry, names)), list(pairwise(places)), function)
    failed = launch([held], workspace.data_ptr())
    return failed, [(workspace if k % 2 else held)[k] for k in range(1, len(names) + 1)]


SEQUENCES = {
    "divided": ["divided"] * 400,
    "one divided": ["alone", "divided", "alone"],
    "alone": ["alone"] * 40,
    "both": ["alone", "alone", "divided", "divided", "alone", "divided", "alone"] * 50,
    "regions": ["region", "divided", "region", "region", "alone", "divided", "divided", "alone", "region"] * 20,
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_each_launch_sees_what_all_threads_wrote_before(name: str, threads: int) -> None:
    names = SEQUENCES[name]
    for _ in range(5):
        failed, results = launched(names, first=5)
        assert failed is None
        assert all(bool((result[:SIZE] == number + 6).all()) for number, result in enumerate(results))


def test_launches_between_divided_ones_are_in_their_region(threads: int) -> None:
    names = ["alone", "divided", "alone", "alone", "divided", "alone", "region", "alone", "divided", "alone"]
    inside = {2, 3} if threads > 1 else set()
    _, results = launched(names)
    assert {position for position, result in enumerate(results) if result[SIZE]} == inside


def test_without_divided_launches_there_is_no_region(threads: int) -> None:
    _, results = launched(["alone"] * 4)
    assert not any(result[SIZE] for result in results)


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("name", ["failing", "failing_alone", "failing_region"])
def test_nothing_is_launched_after_a_failure(name: str, place: int, threads: int) -> None:
    """Whichever thread fails, all of them end at the same launch."""
    others = ["divided", "alone", "divided", "divided", "region", "alone", "alone", "divided"]
    for _ in range(50):
        failed, results = launched([*others[:place], name, *others[place:]])
        assert failed == (place, 1)
        assert all(bool((result[:SIZE] == -1).all()) for result in results[place:])


def test_without_memory_nothing_is_launched(threads: int) -> None:
    failed, results = launched(["divided", "alone", "large", "divided"])
    assert failed == (2, NO_MEMORY)
    assert all(bool((result[:SIZE] == -1).all()) for result in results)
