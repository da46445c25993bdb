"""How the interpreter is set while something is compiled."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

from fusion.codegen.interpreter import OBJECTS, SECONDS, for_compiling


def test_settings_last_until_the_last_one_is_done() -> None:
    before = sys.getswitchinterval(), gc.get_threshold()
    first, second = for_compiling(), for_compiling()
    with first:
        second.__enter__()
        assert sys.getswitchinterval() <= SECONDS < before[0]
        assert gc.get_threshold()[0] >= OBJECTS > before[1][0]
    assert sys.getswitchinterval() <= SECONDS and gc.get_threshold()[0] >= OBJECTS
    second.__exit__(None, None, None)
    assert (sys.getswitchinterval(), gc.get_threshold()) == before


def test_the_shortest_requested_switch_interval_holds() -> None:
    before = sys.getswitchinterval()
    with for_compiling():
        first, second = for_compiling(SECONDS / 10), for_compiling(SECONDS * 10)
        with first, second:
            assert sys.getswitchinterval() < SECONDS / 5
        assert sys.getswitchinterval() > SECONDS / 2
    assert sys.getswitchinterval() == before


def test_disabled_garbage_collection_stays_disabled() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with for_compiling():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_a_training_step_imports_none_of_inductor_s_passes() -> None:
    """They take longer to import than a small model takes to compile."""
    program = (
        "import sys, torch, fusion\n"
        "step = torch.compile(lambda x: torch.softmax(x.exp() + 1, -1).sum(), backend='fusion')\n"
        "step(torch.randn(4, 8, requires_grad=True)).backward()\n"
        "passes = {'torch._inductor.' + name for name in ('debug', 'ir', 'lowering', 'pattern_matcher', 'scheduler')}\n"
        "assert passes.isdisjoint(sys.modules), passes.intersection(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "FUSION_STRICT": "1"})
