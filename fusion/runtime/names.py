"""Names in the Python code of a spliced module, which is meant to be read."""

from __future__ import annotations

from collections.abc import Callable


def identifier(name: str) -> str:
    """`name`, with what an identifier may not have as underscores.

    >>> identifier("model.0-weight"), identifier("2d")
    ('model_0_weight', '_2d')
    """
    cleaned = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return cleaned if cleaned and not cleaned[0].isdigit() else f"_{cleaned}"


def named(launch: Callable[..., object], name: str) -> Callable[..., object]:
    """What is called under a name of its own, for the generated code to read well."""
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
