"""The list of slow tests leaves a case of each parametrised test of this folder."""

from __future__ import annotations

import pytest

from tests.slow_tests import check_that_cases_stay


def test_each_parametrised_test_keeps_a_case(request: pytest.FixtureRequest) -> None:
    check_that_cases_stay(request.config)
