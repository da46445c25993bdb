"""Turns of threads while something is compiled."""

from __future__ import annotations

import sys

from fusion.turns import SECONDS, short_turns


def test_turns_are_short_until_the_last_one_is_done() -> None:
    before = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    with first:
        second.__enter__()
        assert sys.getswitchinterval() <= SECONDS < before
    assert sys.getswitchinterval() <= SECONDS
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before
