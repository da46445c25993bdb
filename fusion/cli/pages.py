"""Writes the page of a report that a command is asked for."""

from __future__ import annotations

import argparse
from dataclasses import replace

import fusion
from fusion.cli.programs import CommandError
from fusion.inspect.finding import Finding


def write_page(
    arguments: argparse.Namespace, explanation: fusion.Explanation, *, good: bool = True, text: str = ""
) -> str:
    """Write the page if `--html` asks for it, and return a line that names it, else "".

    Args:
        explanation: the reports of the compiled program.
        good: whether the command exits with 0.
        text: the outcome of the command, if it says more than the reports.

    Raises:
        CommandError: the file cannot be written.
    """
    if arguments.html is None:
        return ""
    finding = Finding(arguments.command, good, text) if text else None
    try:
        path = replace(explanation, finding=finding).html(arguments.html)
    except OSError as error:
        message = f"{arguments.html} cannot be written: {error.strerror}"
        raise CommandError(message, hint="name a file in a directory that can be written") from error
    return f"The page is in {path}."


__all__ = ["write_page"]
