"""Fences the examples in docstrings, whose `>>>` Markdown would take for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^|(?<=\n))(>>> .*(?:\n(?!\s*$|\n).*)*)", re.MULTILINE)
"""A first prompt, and all lines up to the next empty one."""


def fenced(text: str) -> str:
    """Put each group of examples between fences.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return EXAMPLE.sub(r"```pycon\n\1\n```", text)


class Doctests(griffe.Extension):
    """Fences the examples in every docstring that is read."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
