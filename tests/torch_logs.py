"""Leaves out what PyTorch computes at each compilation for its logs alone, or for what is switched off.

Tests compile thousands of small programs, which spend a good part of their time on it; processes that tests start keep
it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache

import torch

_DYNAMO = "torch._dynamo"

_STAND_INS: Mapping[tuple[str, str], Callable[..., object]] = {
    # Calls the guards many times, with empty caches.
    (f"{_DYNAMO}.guards", "profile_guard_manager"): lambda *_: 0.0,
    # Tokenizes each file that a traced line is in, to name its function.
    (f"{_DYNAMO}.symbolic_convert", "get_funcname"): lambda *_: None,
    # Write all options of Dynamo, AOTAutograd, Inductor and `torch.compiler` as JSON.
    (f"{_DYNAMO}.utils", "_get_dynamo_config_for_logging"): lambda: None,
    (f"{_DYNAMO}.utils", "_functorch_config_for_logging"): lambda: None,
    (f"{_DYNAMO}.utils", "_scrubbed_inductor_config_for_logging"): lambda: None,
    (f"{_DYNAMO}.utils", "_compiler_config_for_logging"): lambda: None,
}
"""Module, function → what is called in its place."""


@cache
def _nothing() -> torch.Tensor:
    return torch.empty(0)


def _reset(state: object) -> None:
    """Reset a state of random numbers, without two tensors of its own that are traced as any other.

    Only `functionalize_rng_ops` reads them, which is off.  Three states are reset before each trace, and after it.
    """
    vars(state).update(seed=_nothing(), base_offset=_nothing(), relative_offset=0, offset_advanced_at_least_once=False)


def leave_out_logs() -> None:
    """Replace those functions in the modules that are imported by now."""
    random = sys.modules.get("torch._decomp.decompositions_for_rng")
    if random is not None:
        random.PhiloxState.reset = _reset
    for (module, name), stand_in in _STAND_INS.items():
        if hasattr(sys.modules.get(module), name):  # PyTorch 2.11 lacks some
            setattr(sys.modules[module], name, stand_in)


__all__ = ["leave_out_logs"]
