"""Writes fx modules as Python files that import the names in their code.

Input: an fx module; output: lines that import or make each name of its code, and the values of its attributes, or the
reason why a file cannot hold one.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from types import ModuleType

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from fusion.graph_cache import KINDS
from fusion.graph_cache.serialise import LARGEST_TENSOR, write
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.kernel import Kernel
from fusion.runtime.chunks import InChunks
from fusion.runtime.memory import allocator_device, in_memory_of

_NUMBERS = {"inf": 'float("inf")', "nan": 'float("nan")', "NoneType": "type(None)"}
"""Names that fx defines in every module, as Python text."""


class NoText(Exception):
    """A file cannot hold a part of a module; the message says which."""


def names_of(
    module: fx.GraphModule, code: str, known: Callable[[str, object], str | None] = lambda name, value: None
) -> list[str]:
    """Return lines that define the names that the code of a module reads.

    Args:
        known: returns the line for a name that only the caller can make; None for others.

    Raises:
        NoText: a name cannot be imported.
    """
    lines: dict[str, None] = {}
    for graph in [module, *(each for each in module.modules() if isinstance(each, fx.GraphModule))]:
        for name, value in graph.graph.python_code("self").globals.items():
            if re.search(rf"\b{re.escape(name)}\b", code) and name != "torch":
                lines[known(name, value) or _definition(name, value)] = None
    return sorted(lines, key=lambda line: (not line.startswith(("import ", "from ")), line))


def _definition(name: str, value: object) -> str:
    """Return the line that defines a name of a module."""
    if name in _NUMBERS:
        return f"{name} = {_NUMBERS[name]}"
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if value is in_memory_of:
        return f"from fusion.runtime.memory import in_memory_of as {name}"
    if (device := allocator_device(value)) is not None:
        return f"{name} = dumps.allocator({device!r})"
    module, qualified = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if module in sys.modules and qualified and getattr(sys.modules[module], qualified, None) is value:
        return f"from {module} import {qualified}" + ("" if name == qualified else f" as {name}")
    raise NoText(f"{name}, a {type(value).__name__}")


def launches_of(module: fx.GraphModule, kernels: Mapping[Kernel, str]) -> Callable[[str, object], str | None]:
    """Return the function that writes how a compiled module gets its launchers and chunked calls.

    Args:
        kernels: the path of each kernel's file, from the folder of the module.
    """
    children = {id(child): name for name, child in module.named_children()}

    def line(name: str, value: object) -> str | None:
        kernel = getattr(value, "kernel", None)
        if isinstance(kernel, Kernel):
            return f"{name} = dumps.kernel(__file__, {kernels[kernel]!r})"
        if isinstance(value, InChunks):
            bodies = [children[id(body.__self__)] for body in value.bodies]  # type: ignore[attr-defined]  # methods of modules
            bare: Chunked[None] = replace(value.node, bodies=(None,) * len(bodies))  # type: ignore[arg-type,assignment]  # without bodies
            return f"{name} = dumps.in_chunks(__file__, {bodies}, {write((bare, value.results), KINDS)!r})"
        return None

    return line


def attributes_of(module: fx.GraphModule, *, nested: bool = True) -> Iterator[str]:
    """Yield an assignment for each tensor that the code of a module reads as an attribute.

    Args:
        nested: whether the text of the module has the classes of those inside it.

    Raises:
        NoText: an attribute is no tensor, and no module whose code is part of the file.
    """
    for name in dict.fromkeys(str(node.target) for node in module.graph.find_nodes(op="get_attr")):
        held: object = reduce(getattr, name.split("."), module)
        if isinstance(held, torch.Tensor) and name.isidentifier():
            yield f"module.{name} = {_tensor(held)}"
        elif not (nested and isinstance(held, fx.GraphModule)) or "." in name:
            raise NoText(f"the attribute {name}, a {type(held).__name__}")


def _tensor(held: torch.Tensor) -> str:
    """Return a call that makes a constant tensor; a large one has other values."""
    layout = f"{tuple(held.shape)}, {tuple(held.stride())}, {held.dtype}, {held.device.type!r}"
    if isinstance(held, FakeTensor) or held.nbytes > LARGEST_TENSOR or held.is_complex():
        return f"dumps.constant({layout})"
    with unset_fake_temporarily():  # graphs are dumped while PyTorch traces
        data = bytes(held.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
    return f"dumps.constant({layout}, {base64.b64encode(data).decode()!r})"


__all__ = ["NoText", "attributes_of", "launches_of", "names_of"]
