"""The code blocks of a page: finds them, compares their outputs, and writes outputs back.

A fence names its language and may have a title. A title that is a file name makes the block that file. The title
"Output" makes it the output of the block before it, in which a line `…` stands for any number of lines. A comment right
above a block says when it runs:

    <!-- run: gpu -->           where there is a GPU
    <!-- run: not -->           not here: a command that takes minutes, or changes the machine
    <!-- run: first             these lines run before the block, and are not shown
    model = torch.nn.Linear(2, 2)
    -->

A comment at the top of a page, `<!-- page: needs peft, accelerate -->`, names packages that all of its blocks import.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = "Output"
LEFT_OUT = "…"

PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
)

_FENCE = re.compile(
    r"(?:^<!-- run: (?P<run>[a-z]+)(?P<before>.*?)-->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One code block.

    Attributes:
        line: the number of its first line of text in the page.
        run: the text of the comment above it; empty without one.
        before: the lines that run before it.
    """

    page: str
    line: int
    language: str
    title: str
    text: str
    run: str
    before: str

    @property
    def place(self) -> str:
        """The page and the line."""
        return f"{self.page}:{self.line}"

    @property
    def is_output(self) -> bool:
        """Is this the output of the block before it?"""
        return self.title == OUTPUT

    @property
    def file(self) -> str:
        """The name of the file that the block holds; empty if it is code of the page."""
        return self.title if re.fullmatch(r"\w+\.py", self.title) else ""


def blocks_of(page: str, text: str) -> list[Block]:
    """Find the blocks of a page, in order."""
    return [
        Block(
            page,
            text.count("\n", 0, result.start("text")) + 1,
            result["language"],
            result["title"] or "",
            result["text"],
            result["run"] or "",
            (result["before"] or "").strip("\n"),
        )
        for result in _FENCE.finditer(text)
    ]


def needed_by(text: str) -> list[str]:
    """List the packages that a page needs in addition to those of the extra `dev`."""
    match = re.search(r"^<!-- page: needs ([\w, ]+) -->$", text, re.MULTILINE)
    return [] if match is None else [name.strip() for name in match[1].split(",")]


def agrees(shown: str, printed: str) -> bool:
    """Is the output `printed` the one that is `shown`, where a line `…` stands for any number of lines?

    >>> agrees("a\\n…\\nd", "a\\nb\\nc\\nd\\n"), agrees("a\\nd", "a\\nb\\nd")
    (True, False)
    """
    lines = [line.rstrip() for line in shown.strip("\n").split("\n")]
    patterns = (r"(?:.*\n)*?" if line.strip() == LEFT_OUT else re.escape(line) + r"[ \t]*\n" for line in lines)
    return re.fullmatch("".join(patterns), printed.strip("\n") + "\n") is not None


def written_back(text: str, printed: dict[int, str]) -> str:
    """Replace the texts of blocks, given by their first lines, in a page; blocks with `…` stay as they are."""

    def replaced(result: re.Match[str]) -> str:
        line = text.count("\n", 0, result.start("text")) + 1
        if line not in printed or LEFT_OUT in result["text"]:
            return result[0]
        begin, end = result.start("text") - result.start(), result.end("text") - result.start()
        return result[0][:begin] + printed[line].strip("\n") + "\n" + result[0][end:]

    return _FENCE.sub(replaced, text)
