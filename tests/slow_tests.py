"""Marks as slow the tests that `slow_tests.txt` lists, and writes that list from measured CPU time.

    pytest tests -n 2 --refresh-slow-tests

`make test` leaves slow tests to `make test-slow`.  Of the cases of one parametrised test function the cheapest stays in
`make test`, whatever it takes, unless `SLOW_THROUGHOUT` says why none does; of the others those that take no more than
`EACH_CASE`; of other tests those that take no more than `ONE_CASE`, and those of `STAYING`.  A file that is not part of
the run keeps its entries.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")

EACH_CASE = 0.08
"""CPU seconds, with child processes, above which a case of a parametrised test is slow."""

ONE_CASE = 2.0
"""CPU seconds above which a test that is not parametrised is slow."""

SLOW_THROUGHOUT = {
    "tests/faults/test_faults.py::test_many_trials_of_a_kind": "`test_a_trial_of_each_kind` tries each kind once",
}
"""Parametrised test functions of which no case is part of `make test` → why."""

STAYING = {
    "tests/codegen/c/test_sanitized.py::test_kernels_reach_for_nothing_else": "no other test sees reads out of bounds",
    "tests/documents/test_site.py::test_the_site_builds_without_a_warning": "no other test follows the links",
    "tests/faults/test_faults.py::test_a_trial_of_each_kind": "no other test injects faults",
    "tests/test_architecture.py::test_imports_go_one_way": "no other test sees circles of imports",
    "tests/test_wheel.py::test_an_installed_wheel_runs_outside_of_the_checkout": "no other test installs the package",
}
"""Tests without cases that stay in `make test` whatever they take → why."""

PLUGIN = "slow-tests"
"""The name of the plugin below."""


def listed() -> frozenset[str]:
    """Return the node ids of the list."""
    return frozenset(LIST.read_text(encoding="utf-8").splitlines())


def slow_ones(seconds: Mapping[str, float]) -> set[str]:
    """Return the slow tests, given the CPU seconds of each node id.

    >>> sorted(slow_ones({"a.py::f[0]": 4.0, "a.py::f[1]": 5.0, "a.py::g": 1.0, "b.py::h": 9.0}))
    ['a.py::f[1]', 'b.py::h']
    """

    def is_slow(name: str, position: int) -> bool:
        if position:
            return seconds[name] > EACH_CASE
        return (
            seconds[name] > ONE_CASE and name not in STAYING and ("[" not in name or _function(name) in SLOW_THROUGHOUT)
        )

    cases: dict[str, list[str]] = defaultdict(list)
    for name in sorted(seconds, key=seconds.__getitem__):
        cases[_function(name)].append(name)
    return {name for names in cases.values() for position, name in enumerate(names) if is_slow(name, position)}


def slow_throughout(collected: Iterable[str], names: Collection[str]) -> set[str]:
    """Return the parametrised functions of which all cases are listed in `names`, of the collected node ids.

    >>> slow_throughout(["a.py::f[0]", "a.py::f[1]", "a.py::g[0]", "a.py::h"], {"a.py::f[0]", "a.py::g[0]", "a.py::h"})
    {'a.py::g'}
    """
    cases = {name for name in collected if "[" in name}
    return {*map(_function, cases)} - {_function(name) for name in cases if name not in names}


class SlowTests:
    """The plugin: measures each test, and marks, or writes, those that are slow."""

    def __init__(self, *, refresh: bool) -> None:
        self.refresh = refresh
        self.seconds: dict[str, float] = {}
        self.collected: tuple[str, ...] = ()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Mark the tests of the list, before `-m` selects by marks."""
        self.collected = tuple(item.nodeid for item in items)
        if self.refresh:
            return
        names = listed()
        if not any("::" in argument for argument in config.args):
            check_that_all_exist(names, items)
        for item in items:
            if item.nodeid in names:
                item.add_marker(pytest.mark.slow)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note the CPU time at which a test begins."""
        item.stash[_BEGUN] = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the CPU time up to here to each report; that of the teardown has all of the test's."""
        report = yield
        report.user_properties.append(("cpu", _cpu_seconds() - item.stash.get(_BEGUN, _cpu_seconds())))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the times, from all workers."""
        self.seconds[report.nodeid] = max(value for key, value in report.user_properties if key == "cpu")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the list."""
        if not self.refresh or hasattr(session.config, "workerinput"):
            return
        run = {_file(name) for name in self.seconds}
        kept = {name for name in listed() if _file(name) not in run}
        LIST.write_text("".join(f"{name}\n" for name in sorted(kept | slow_ones(self.seconds))), encoding="utf-8")


_BEGUN = pytest.StashKey[float]()


def _cpu_seconds() -> float:
    user, system, children, of_children, _ = os.times()
    return user + system + children + of_children


def _file(name: str) -> str:
    return name.partition("::")[0]


def _function(name: str) -> str:
    return name.partition("[")[0]


def check_that_all_exist(names: Iterable[str], items: Iterable[pytest.Item]) -> None:
    """Check that no entry of a collected file names a test function that is gone; cases may depend on the release.

    Raises:
        pytest.UsageError: some do.
    """
    functions = {_function(item.nodeid) for item in items}
    files = {_file(name) for name in functions}
    gone = sorted({_function(name) for name in names if _file(name) in files} - functions)
    if gone:
        raise pytest.UsageError(f"{LIST.name} lists tests that do not exist: {', '.join(gone)}")


def check_that_cases_stay(config: pytest.Config) -> None:
    """Check that each parametrised function of the run has a case that is not listed, or says why not.

    Raises:
        AssertionError: some have none.
    """
    plugin = config.pluginmanager.getplugin(PLUGIN)
    assert isinstance(plugin, SlowTests)
    if any("::" in argument for argument in config.args):
        pytest.skip("only some cases are collected")
    missing = slow_throughout(plugin.collected, listed()) - SLOW_THROUGHOUT.keys()
    assert not missing, f"no case in `make test`, and no reason in SLOW_THROUGHOUT: {', '.join(sorted(missing))}"
