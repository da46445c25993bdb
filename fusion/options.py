"""Options: everything a user can set, in one place.

From the call (`fuse(model, mode=…, options={…})`, `torch.compile(model, backend="fusion", options={…})`) and from the
environment:

    FUSION_DUMP=dir        write every stage of every compiled graph below `dir`
    FUSION_STRICT=1        raise where a region would otherwise fall back to eager
    FUSION_CACHE_DIR=dir   where built kernels are kept (default: `$XDG_CACHE_HOME/fusion` or `~/.cache/fusion`)
    FUSION_GRAPH_CACHE=0   compile each graph anew, whatever an earlier process made of it

The second and the last one are switches: 1, true, yes, on; 0, false, no, off, or nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

from fusion.codegen.targets import TARGETS

T = TypeVar("T")

MODES = ("default", "reduce-overhead", "max-autotune")

NUMERICS = ("default", "strict")
"""How results are rounded: see docs/numerics.md."""

SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""How a variable of the environment says yes or no.  One that is empty says no."""

WORKSPACE = 1 << 29
"""Bytes: a larger product that nobody needs whole is made a few rows at a time."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a compilation was asked for.

    Attributes:
        mode: "default"; "reduce-overhead", which sets `cudagraphs`; "max-autotune", which times configurations on the
            device.
        target: name of the target to generate for; None picks by device.
        dump: directory for dumps, or None.
        strict: raise instead of falling back to eager.
        workspace: bytes above which a product that nobody needs whole is made in chunks.
        numerics: "default", or "strict": every value is rounded as eager rounds it.
        cudagraphs: record the launches of a graph, and play them again in one call.
        graph_cache: take what an earlier process made of the same graph from the cache directory.
    """

    mode: str = "default"
    target: str | None = None
    dump: Path | None = None
    strict: bool = False
    workspace: int = WORKSPACE
    numerics: str = "default"
    cudagraphs: bool = False
    graph_cache: bool = field(default_factory=lambda: _switch("FUSION_GRAPH_CACHE", default=True))

    @property
    def exact(self) -> bool:
        """Is every value to be rounded as eager rounds it?"""
        return self.numerics == "strict"

    @classmethod
    def read(cls, mode: str | None = None, options: Mapping[str, object] | None = None) -> Options:
        """Options from a call, the environment filling in what the call leaves open.

        Raises:
            ValueError: an unknown mode, key or value, also of a variable, with the known ones; a file where dumps
                would go.
            TypeError: a value of the wrong type.
        """
        dump = os.environ.get("FUSION_DUMP")
        result = cls(dump=_folder(Path(dump)) if dump else None, strict=_switch("FUSION_STRICT", default=False))
        if mode is not None:
            result = replace(result, mode=_known("mode", mode, MODES), cudagraphs=mode == "reduce-overhead")
        if options is None:
            return result
        if not isinstance(options, Mapping):
            raise TypeError(f"options must be a mapping, got {type(options).__name__}")
        known = sorted({each.name for each in fields(cls)} - {"mode"})
        for key, value in options.items():
            name = _known("option", key, known)
            result = replace(result, **{name: _checked(name, value)})  # type: ignore[arg-type]  # _checked has looked
        return result


def _switch(variable: str, *, default: bool) -> bool:
    """What a variable of the environment says; `default` where there is none.

    Raises:
        ValueError: it says neither yes nor no.
    """
    said = os.environ.get(variable)
    if said is None:
        return default
    word = said.strip().lower()
    if word and word not in SWITCHES:
        raise ValueError(f"unknown {variable}={said!r}; known: {', '.join(SWITCHES)}, or nothing for off")
    return bool(word) and SWITCHES[word]


def _known(what: str, name: object, names: Iterable[str]) -> str:
    """`name`, if it is one of `names`."""
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(names)}")
    return name


def _checked(key: str, value: object) -> object:
    """The value of an option, as it is kept."""
    match key:
        case "target":
            return None if value is None else _known(key, value, sorted(TARGETS))
        case "numerics":
            return _known(key, value, NUMERICS)
        case "dump":
            return None if value is None else _folder(Path(str(_of(key, value, (str, Path), "a path"))))
        case "workspace":
            return _positive(key, _of(key, value, int, "a number of bytes"))
        case _:
            return _of(key, value, bool, "a bool")


def _of(key: str, value: object, kind: type[T] | tuple[type[T], ...], name: str) -> T:
    """`value`, if it is of this kind.  A bool is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{key} must be {name}, got {type(value).__name__}")
    return value


def _positive(key: str, number: int) -> int:
    if number <= 0:
        raise ValueError(f"{key} must be positive, got {number}")
    return number


def _folder(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ValueError(f"dump must be a directory, and {path} is a file")
    return path
