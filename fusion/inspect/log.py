"""Logs compilations to Python's logger "fusion": a line for each graph (INFO), and its report (DEBUG).

    logging.getLogger("fusion").setLevel(logging.DEBUG)      as for any library
    TORCH_LOGS=fusion python program.py                      as for PyTorch: everything, in its format
    TORCH_TRACE=dir python program.py                        an artifact for each graph, which tlparse lists

PyTorch has an artifact "fusion" of its own, TorchInductor's decisions about fusion, so that `TORCH_LOGS=fusion` shows
these, too, where both compile.
"""

from __future__ import annotations

import logging
from functools import cache

from torch._logging import _internal as torch_logging

from fusion.inspect.report import Report

ARTIFACT = "fusion"


@cache
def logger() -> logging.Logger:
    """Return the logger, which PyTorch's setting has switched on if it names it."""
    log = logging.getLogger("fusion")
    if torch_logging.log_state.is_artifact_enabled(ARTIFACT):  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        log.setLevel(logging.DEBUG)
        if not log.handlers:
            torch_logging._setup_handlers(logging.StreamHandler, log)
    return log


def log_report(report: Report) -> None:
    """Log the report of a graph that was compiled, loaded or left to eager, also as an artifact under TORCH_TRACE."""
    torch_logging.trace_structured_artifact(f"fusion_{report.label.replace(', ', '_')}", "string", lambda: str(report))
    log = logger()
    if log.isEnabledFor(logging.INFO):
        headline, *details = str(report).splitlines()
        log.info("%s", headline)
        if details and log.isEnabledFor(logging.DEBUG):
            log.debug("%s", "\n".join(details))
