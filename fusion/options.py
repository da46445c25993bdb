"""Options: everything a user can set, in one place.

From the call (`fuse(model, mode=…, options={…})`, `torch.compile(model, backend="fusion", options={…})`) and from the
environment:

    FUSION_DUMP=dir        write every stage of every compiled graph below `dir`
    FUSION_STRICT=1        raise where a region would otherwise fall back to eager
    FUSION_CACHE_DIR=dir   where built kernels are kept (default: `$XDG_CACHE_HOME/fusion` or `~/.cache/fusion`)
    FUSION_GRAPH_CACHE=0   compile each graph anew, whatever an earlier process made of it
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from codegen.targets import TARGETS

MODES = ("default", "reduce-overhead", "max-autotune")

NUMERICS = ("default", "strict")
"""How results are rounded: see docs/numerics.md."""

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
    graph_cache: bool = field(default_factory=lambda: os.environ.get("FUSION_GRAPH_CACHE", "1") not in ("", "0"))

    @property
    def exact(self) -> bool:
        """Is every value to be rounded as eager rounds it?"""
        return self.numerics == "strict"

    @classmethod
    def read(cls, mode: str | None = None, options: Mapping[str, object] | None = None) -> Options:
        """Options from a call, the environment filling in what the call leaves open.

        Raises:
            ValueError: an unknown mode, key or value, with the known ones; a file where dumps would go.
            TypeError: a value of the wrong type.
        """
        dump = os.environ.get("FUSION_DUMP")
        result = cls(
            dump=_folder(Path(dump)) if dump else None, strict=os.environ.get("FUSION_STRICT", "0") not in ("", "0")
        )
        if mode is not None:
            if mode not in MODES:
                raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
            result = replace(result, mode=mode, cudagraphs=mode == "reduce-overhead")
        if options is None:
            return result
        if not isinstance(options, Mapping):
            raise TypeError(f"options must be a mapping, got {type(options).__name__}")
        known = {each.name for each in fields(cls)} - {"mode"}
        for key, value in options.items():
            if key not in known:
                raise ValueError(f"unknown option {key!r}; known: {', '.join(sorted(known))}")
            result = replace(result, **{key: _checked(key, value)})  # type: ignore[arg-type]  # _checked has looked
        return result


def _checked(key: str, value: object) -> object:
    if key == "target":
        if value is not None and value not in TARGETS:
            raise ValueError(f"unknown target {value!r}; known: {', '.join(sorted(TARGETS))}")
        return value
    if key == "numerics":
        if value not in NUMERICS:
            raise ValueError(f"unknown numerics {value!r}; known: {', '.join(NUMERICS)}")
        return value
    if key == "dump":
        if value is not None and not isinstance(value, (str, Path)):
            raise TypeError(f"dump must be a path, got {type(value).__name__}")
        return None if value is None else _folder(Path(value))
    if key == "workspace":
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"workspace must be a number of bytes, got {type(value).__name__}")
        if value <= 0:
            raise ValueError(f"workspace must be positive, got {value}")
        return value
    if not isinstance(value, bool):
        raise TypeError(f"{key} must be a bool, got {type(value).__name__}")
    return value


def _folder(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ValueError(f"dump must be a directory, and {path} is a file")
    return path
