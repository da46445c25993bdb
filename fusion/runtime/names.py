"""Chooses the names in the Python code of a spliced module."""

from __future__ import annotations

from collections.abc import Callable


def identifier(name: str) -> str:
    """Return `name` with underscores for characters that identifiers may not have.

    >>> identifier("model.0-weight"), identifier("2d")
    ('model_0_weight', '_2d')
    """
    cleaned = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return cleaned if cleaned and not cleaned[0].isdigit() else f"_{cleaned}"


def named(launch: Callable[..., object], name: str) -> Callable[..., object]:
    """Give a callable a name of its own, so that the generated code is readable."""
    try:
        launch.__name__ = launch.__qualname__ = name
        launch.__module__ = "kernels"
        return launch
    except AttributeError:

        def call(*args: object) -> object:
            return launch(*args)

        call.__name__ = call.__qualname__ = name
        call.__module__ = "kernels"
        return call
