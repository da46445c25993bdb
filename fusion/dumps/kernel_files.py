"""Writes and reads the file of one kernel, which runs by itself.

Input: a kernel with its source and figures; output: Python text that holds the source with its origins, functions that
make inputs, and the block program that is the reference; run, it checks the kernel and measures it (`running.py`).
Read, it gives back the kernel and the source, which may have been edited (`override.py`).

Python sources are part of the text as they are, between two lines of comment; others are the text `SOURCE`.
"""

from __future__ import annotations

import ast
import base64
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import sympy
import torch

from fusion.codegen.cache import digest
from fusion.codegen.numerics import Numerics
from fusion.codegen.target import Target
from fusion.dumps.inputs import Draw
from fusion.dumps.ranges import Range, ranges_of
from fusion.graph_cache import KINDS
from fusion.graph_cache.serialise import read, write
from fusion.lowering.errors import FusionError
from fusion.lowering.ir.kernel import Kernel, Param, only_stored
from fusion.lowering.ir.sizes import estimate
from fusion.lowering.printer import format_kernel

BEGIN = "# ==== source: edit it here ===="
END = "# ==== end of the source ===="
INTERPRETED = (
    "import os",
    "",
    "import torch",
    "",
    "if not torch.cuda.is_available():",
    '    os.environ["TRITON_INTERPRET"] = "1"  # decided before Triton is imported',
    "",
)
"""The lines above the imports of a file with kernels in Triton: without a GPU, its interpreter runs them."""

_WIDTH = 100
_DAMAGE = (ValueError, KeyError, IndexError, TypeError, AttributeError)
"""The errors of reading a form that is malformed, or of another version."""


class Unreadable(FusionError):
    """A file is not as a dump writes it."""


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """The work of one launch: bytes moved if each tensor is touched once, and arithmetic in additions."""

    moved: int
    operations: int


@dataclass(frozen=True, slots=True)
class KernelFile:
    """Holds the content of a kernel's file.

    Attributes:
        path: the file.
        source: the text of the kernel, perhaps edited.
        original: the mark of the text that was generated (`mark_of`).
    """

    path: Path
    kernel: Kernel
    target: str
    numerics: Numerics
    source: str
    original: str

    @property
    def is_edited(self) -> bool:
        """Whether the source differs from the generated source."""
        return mark_of(self.kernel, self.source) != self.original


def mark_of(kernel: Kernel, source: str) -> str:
    """Return a key of a source that does not depend on the lines of the program named in its comments."""
    origins = {line.strip(" */#") for line in kernel.origins}
    lines = (line.rstrip() for line in source.strip().splitlines())
    return digest("\n".join(line for line in lines if line.strip(" */#") not in origins))[:32]


# Writing --------------------------------------------------------------------------------------------------------------


def kernel_text(kernel: Kernel, source: str, generated: str, target: Target, figures: LaunchWork) -> str:
    """Return the text of a file.

    Args:
        source: the text that runs.
        generated: the text that was generated: the same, unless it was overridden.

    Raises:
        Unwritten: the kernel cannot be serialised.
    """
    sizes = sizes_of(kernel)
    lines = [
        *_head(kernel, source, target),
        "",
        f"TARGET, NUMERICS = {target.name!r}, {_numerics(target.numerics)}",
        f"SIZES = {tuple(sizes[size] for size in kernel.sizes)}  # {_names(kernel)}",
        f"BYTES, OPERATIONS = {figures.moved}, {figures.operations}  # of one launch",
        "",
        "",
        *_inputs(kernel, sizes),
        "",
        "",
        "# The reference is this block program, evaluated in float64:",
        "#",
        *(f"# {line}".rstrip() for line in format_kernel(kernel).splitlines()),
        f'ORIGINAL = "{mark_of(kernel, generated)}"',
        *_literal("KERNEL", _packed(write(kernel, KINDS))),
        "",
        'if __name__ == "__main__":',
        "    dumps.run_kernel(__file__, inputs, SIZES, BYTES, OPERATIONS)",
    ]
    return "\n".join(lines)


def _head(kernel: Kernel, source: str, target: Target) -> Iterator[str]:
    """Yield the lines above the inputs: the source and the imports."""
    yield f"# {kernel.name}: run this file to check the kernel against float64 and to measure it."
    if target.suffix == "py":
        yield from INTERPRETED
        yield from (BEGIN, *source.split("\n"), END)
        yield from ("", "import torch", "", "from fusion import dumps")
    else:
        yield from ("import torch", "", "from fusion import dumps", "")
        yield from _quoted("SOURCE", source)


def _quoted(name: str, text: str) -> Iterator[str]:
    """Yield an assignment of a text, as readable as its characters allow."""
    if "'''" not in text and "\r" not in text:
        yield f"{name} = r'''"
        yield from text.split("\n")
        yield "'''"
        return
    yield f"{name} = ("
    yield from (f"    {line!r}" for line in f"\n{text}\n".splitlines(keepends=True))
    yield ")"


def _literal(name: str, text: str) -> Iterator[str]:
    """Yield an assignment of a long text of one line."""
    yield f"{name} = ("
    yield from (f"    {text[start : start + _WIDTH]!r}" for start in range(0, len(text), _WIDTH))
    yield ")"


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text, validate=True)).decode()


def _numerics(numerics: Numerics) -> dict[str, bool]:
    return {"strict": numerics.strict, "tf32": numerics.tf32, "invariant": numerics.invariant}


def _names(kernel: Kernel) -> str:
    return ", ".join(map(str, kernel.sizes)) or "all sizes are known"


def sizes_of(kernel: Kernel) -> dict[sympy.Symbol, int]:
    """Return a value for each size symbol of a kernel: the traced one, else one like others."""
    known = dict(kernel.traced)
    declared = {size for part in kernel.launched for p in part.params for size in (*p.shape, *p.strides)}
    symbols = {symbol for size in declared for symbol in size.free_symbols} | {*kernel.sizes}
    return known | {symbol: estimate(symbol, known) for symbol in symbols - known.keys()}


def _inputs(kernel: Kernel, sizes: Mapping[sympy.Symbol, int]) -> Iterator[str]:
    """Yield the function that makes the tensors of a launch."""
    ranges, unread = ranges_of(kernel, sizes), only_stored(kernel)
    yield "def inputs(draw):"
    yield '    """Make the tensors of a launch: values as their dtypes and the checks of the kernel allow."""'
    yield "    return ("
    for param in kernel.params:
        shape, strides = (tuple(estimate(size, sizes) for size in of) for of in (param.shape, param.strides))
        call = _drawn(param, shape, strides, ranges.get(param.name), is_result=param.name in unread and param.written)
        yield f"        draw.{call},  # {param.name}{', written' if param.written else ''}"
    yield "    )"


def inputs_of(kernel: Kernel) -> Callable[[Draw], Sequence[torch.Tensor]]:
    """Return the function that the file of a kernel would make its inputs with."""
    names: dict[str, object] = {"torch": torch}
    exec("\n".join(_inputs(kernel, sizes_of(kernel))), names)
    return cast("Callable[[Draw], Sequence[torch.Tensor]]", names["inputs"])


def _drawn(
    param: Param, shape: tuple[int, ...], strides: tuple[int, ...], known: Range | None, *, is_result: bool
) -> str:
    """Return the call that makes one tensor."""
    layout, host = f"{shape}, {strides}", ", host=True" if param.number else ""
    if is_result:
        return f"result({layout}, {param.dtype})"
    if param.dtype is torch.bool:
        return f"booleans({layout}{host})"
    if param.dtype.is_floating_point:
        return f"normal({layout}, {param.dtype}{host})"
    limits = "" if known is None else f", {known[0]}, {known[1]}"
    return f"integers({layout}, {param.dtype}{limits}{host})"


# Reading --------------------------------------------------------------------------------------------------------------


def is_kernel_file(text: str) -> bool:
    """Return whether a text looks like the file of a kernel."""
    return "\nKERNEL = (" in text and "from fusion import dumps" in text


def read_kernel_file(path: Path) -> KernelFile:
    """Read a file.

    Raises:
        Unreadable: it is no such file, or another version of Fusion wrote it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = _assigned(ast.parse(text))
        kernel = read(_unpacked(str(values["KERNEL"])), KINDS)
        name, numerics = cast("tuple[str, dict[str, bool]]", values["TARGET, NUMERICS"])
        source = str(values["SOURCE"])[1:-1] if "SOURCE" in values else _between(text)
        if not isinstance(kernel, Kernel):
            raise TypeError("KERNEL is no kernel")
        return KernelFile(path, kernel, name, Numerics(**numerics), source, str(values["ORIGINAL"]))
    except (*_DAMAGE, OSError, SyntaxError, zlib.error) as error:
        hint = "dump it again with this version of Fusion, and edit the source alone"
        raise Unreadable(f"{path} cannot be read as the file of a kernel: {error!r}", hint=hint) from error


def _assigned(tree: ast.Module) -> dict[str, object]:
    """Return the literals that a module assigns, by the text of their names."""
    values: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = ast.unparse(node.targets[0]).strip("()")
            if target in ("SOURCE", "ORIGINAL", "KERNEL", "TARGET, NUMERICS"):
                values[target] = ast.literal_eval(node.value)
    return values


def _between(text: str) -> str:
    """Return the lines between the comments that enclose a source."""
    lines = text.split("\n")
    return "\n".join(lines[lines.index(BEGIN) + 1 : lines.index(END)])


__all__ = [
    "INTERPRETED",
    "KernelFile",
    "LaunchWork",
    "Unreadable",
    "inputs_of",
    "is_kernel_file",
    "kernel_text",
    "mark_of",
    "read_kernel_file",
    "sizes_of",
]
