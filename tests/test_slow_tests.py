"""The list of slow tests: which tests are on it, and that stale entries are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.slow_tests import (
    EACH_CASE,
    ONE_CASE,
    SLOW_THROUGHOUT,
    STAYING,
    check_that_all_exist,
    check_that_cases_stay,
    listed,
    slow_ones,
)


def test_the_cheapest_case_of_a_test_stays() -> None:
    seconds = {"a.py::f[0]": 3 * EACH_CASE, "a.py::f[1]": 2 * EACH_CASE, "a.py::f[2]": EACH_CASE / 2}
    assert slow_ones(seconds) == {"a.py::f[0]", "a.py::f[1]"}
    del seconds["a.py::f[2]"]
    assert slow_ones(seconds) == {"a.py::f[0]"}
    assert not slow_ones({"a.py::g[0]": 2 * ONE_CASE})


def test_no_case_stays_of_a_test_that_says_why() -> None:
    name = next(iter(SLOW_THROUGHOUT))
    assert slow_ones({f"{name}[0]": 2 * ONE_CASE, f"{name}[1]": 3 * ONE_CASE}) == {f"{name}[0]", f"{name}[1]"}


def test_a_test_without_cases_is_slow_above_the_higher_limit() -> None:
    assert slow_ones({"a.py::f": 2 * ONE_CASE, "a.py::h": ONE_CASE / 2}) == {"a.py::f"}


def test_a_test_that_stays_is_not_slow(request: pytest.FixtureRequest) -> None:
    assert not slow_ones(dict.fromkeys(STAYING, 9 * ONE_CASE)) and not listed() & STAYING.keys()
    check_that_all_exist(STAYING, request.session.items)


def test_each_parametrised_test_keeps_a_case(request: pytest.FixtureRequest) -> None:
    """Of the files of this run; `tests/interpreter/`, which runs in a process of its own, asks the same."""
    check_that_cases_stay(request.config)


def test_entries_of_collected_files_must_exist() -> None:
    items = [SimpleNamespace(nodeid="a.py::f[0]")]
    check_that_all_exist({"a.py::f[1]", "b.py::g"}, items)  # b.py is not part of the run, cases may differ
    with pytest.raises(pytest.UsageError, match=r"a\.py::gone"):
        check_that_all_exist({"a.py::gone"}, items)


def test_the_list_names_files_that_exist(request: pytest.FixtureRequest) -> None:
    names = listed()
    files = {name.partition("::")[0] for name in names}
    assert names
    assert all((request.config.rootpath / file).is_file() for file in files)
