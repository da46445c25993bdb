"""Defines all options of the compiler.

From the call (`fuse(model, mode=…, options={…})`, `torch.compile(model, backend="fusion", options={…})`) and from the
environment:

    FUSION_DUMP=dir        write every stage of every compiled graph below `dir`
    FUSION_OVERRIDE=dir    launch the edited kernels in `dir` instead of the generated ones
    FUSION_STRICT=1        raise where a region would otherwise fall back to eager
    FUSION_CACHE_DIR=dir   where built kernels are kept (default: `$XDG_CACHE_HOME/fusion` or `~/.cache/fusion`)
    FUSION_GRAPH_CACHE=0   compile each graph anew, not from the entry of an earlier process
    FUSION_CLOSE_CALLS=0   decide by predictions alone, however close they are
    FUSION_PROGRESS=0      show no line on the terminal during a long compilation

Variables that name no directory are switches: 1, true, yes, on; 0, false, no, off, or nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

from fusion.codegen.numerics import Numerics, current
from fusion.codegen.targets import TARGETS

T = TypeVar("T")

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

NUMERICS = ("default", "strict", "batch_invariant")
"""How results are rounded: see docs/numerics.md."""

SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""How a variable of the environment says yes or no.  One that is empty says no."""

WORKSPACE = 1 << 29
"""Bytes: a larger product that nobody needs whole is computed a few rows at a time."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """The most that each compiled graph may have: forward and backward are one each.

    Attributes:
        kernels: launches of generated kernels; None for any number.
        externs: calls that are left to PyTorch; None for any number.
    """

    kernels: int | None = None
    externs: int | None = None

    @classmethod
    def read(cls, given: object) -> Requirements:
        """Read requirements from a mapping.

        Raises:
            TypeError: it is no mapping, or a value is no whole number.
            ValueError: a name is unknown, a number is negative, or nothing is required.

        >>> Requirements.read({"kernels": 1})
        Requirements(kernels=1, externs=None)
        """
        if isinstance(given, Requirements):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"require must be a mapping, got {type(given).__name__}")
        known = [each.name for each in fields(cls)]
        for name, number in given.items():
            if name not in known:
                raise ValueError(f"unknown requirement {name!r}; known: {', '.join(known)}")
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise TypeError(f"require: {name} must be a number, got {type(number).__name__}")
            if number is not None and number < 0:
                raise ValueError(f"require: {name} must not be negative, got {number}")
        read = cls(**given)
        if read == cls():
            raise ValueError(f"nothing is required; known: {', '.join(known)}")
        return read


@dataclass(frozen=True, slots=True)
class Options:
    """Holds the options of a compilation.

    Attributes:
        mode: "default"; "reduce-overhead", which sets `cudagraphs`; "max-autotune", which times configurations on the
            device.
        target: name of the target to generate for: "c", "triton" or "reference"; None picks it by the device of the
            tensors.
        dump: directory below which every stage of every compiled graph is written; None writes nothing.
        override: directory with files of kernels that a dump wrote; edited ones replace the generated sources, once
            their numbers have been checked.
        strict: raise where a captured region would otherwise fall back to eager, at compilation or in a call.
        workspace: size in bytes above which a matrix product that is not needed whole is computed some rows at a time;
            positive.
        numerics: "default"; "strict", which rounds every value as eager rounds it; "batch_invariant", which also
            computes each row in the same way whatever else is in the batch, and refuses targets other than C and
            Triton (docs/numerics.md).
        cudagraphs: record the launches of each graph as a CUDA graph, one for each set of sizes, and play it in one
            call; results are valid until the next step.
        graph_cache: load a graph that an earlier process compiled from the cache directory.
        require: the most kernels and library calls that a compiled graph may have, such as `{"kernels": 1}`; one with
            more, or a graph that runs eagerly, raises `NotAsRequired`.
        close_calls: time ways to compute a product whose predictions are close, within a tenth of the compile time.
    """

    mode: str = "default"
    target: str | None = None
    dump: Path | None = None
    override: Path | None = None
    strict: bool = False
    workspace: int = WORKSPACE
    numerics: str = "default"
    cudagraphs: bool = False
    require: Requirements | None = None
    graph_cache: bool = field(default_factory=lambda: _switch("FUSION_GRAPH_CACHE", default=True))
    close_calls: bool = field(default_factory=lambda: _switch("FUSION_CLOSE_CALLS", default=True))

    @property
    def exact(self) -> bool:
        """Whether every value is rounded as eager rounds it."""
        return self.numerics != "default"

    @property
    def invariant(self) -> bool:
        """Whether the computation of a row is independent of the other rows of the batch."""
        return self.numerics == "batch_invariant"

    @property
    def current_numerics(self) -> Numerics:
        """The numerics of a compilation that starts now."""
        return current(strict=self.exact, invariant=self.invariant)

    @classmethod
    def read(cls, mode: str | None = None, options: Mapping[str, object] | None = None) -> Options:
        """Read options from the arguments of a call and, where these leave them open, from the environment.

        Args:
            mode: one of `MODES`; None is "default".
            options: names of the attributes above, but for `mode`, with their values.

        Raises:
            ValueError: unknown mode, option or value, also of a variable of the environment (the message lists the
                known ones); `dump` is a file, `override` is no directory, or one lies within the other.
            TypeError: `options` is no mapping, or a value has the wrong type.

        >>> Options.read("reduce-overhead", {"workspace": 1 << 20}).cudagraphs
        True
        >>> Options.read("max-autotune-no-cudagraphs").mode  # which records no CUDA graphs, in any case
        'max-autotune'
        """
        shows_progress()  # raises for a word that it does not know, rather than in a compilation
        dump, override = os.environ.get("FUSION_DUMP"), os.environ.get("FUSION_OVERRIDE")
        result = cls(
            dump=_folder(Path(dump)) if dump else None,
            override=_existing(Path(override)) if override else None,
            strict=_switch("FUSION_STRICT", default=False),
        )
        if mode is not None:
            wished = _known("mode", mode, MODES).removesuffix("-no-cudagraphs")
            result = replace(result, mode=wished, cudagraphs=mode == "reduce-overhead")
        if options is None:
            return _apart(result)
        if not isinstance(options, Mapping):
            raise TypeError(f"options must be a mapping, got {type(options).__name__}")
        known = sorted({each.name for each in fields(cls)} - {"mode"})
        for key, value in options.items():
            name = _known("option", key, known)
            result = replace(result, **{name: _checked(name, value)})  # type: ignore[arg-type]  # `_checked` has tested the type
        return _apart(result)


def shows_progress() -> bool:
    """Return whether a terminal shows the progress of a long compilation.

    Raises:
        ValueError: the environment says neither yes nor no.
    """
    return _switch("FUSION_PROGRESS", default=True)


def _switch(variable: str, *, default: bool) -> bool:
    """Return the value of a switch in the environment; `default` if it is not set.

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
    """Return `name` if it is one of `names`, else raise ValueError; `what` is named in the message."""
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(names)}")
    return name


def _checked(key: str, value: object) -> object:
    """Check the value of an option, and return it in the form in which `Options` keeps it."""
    match key:
        case "target":
            return None if value is None else _known(key, value, sorted(TARGETS))
        case "numerics":
            return _known(key, value, NUMERICS)
        case "dump":
            return None if value is None else _folder(Path(str(_of(key, value, (str, Path), "a path"))))
        case "override":
            return None if value is None else _existing(Path(str(_of(key, value, (str, Path), "a path"))))
        case "require":
            return None if value is None else Requirements.read(value)
        case "workspace":
            return _positive(key, _of(key, value, int, "a number of bytes"))
        case _:
            return _of(key, value, bool, "a bool")


def _of(key: str, value: object, kind: type[T] | tuple[type[T], ...], name: str) -> T:
    """Return `value`, if it is of this kind.  A bool is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{key} must be {name}, got {type(value).__name__}")
    return value


def _positive(key: str, number: int) -> int:
    if number <= 0:
        raise ValueError(f"{key} must be positive, got {number}")
    return number


def _apart(options: Options) -> Options:
    """Return options whose dump overwrites no edited kernel.

    Raises:
        ValueError: one of the two directories lies within the other.
    """
    if options.dump is not None and options.override is not None:
        dump, override = options.dump.resolve(), options.override.resolve()
        if dump == override or dump in override.parents or override in dump.parents:
            raise ValueError(f"override must lie apart from dump, whose files are overwritten: {override}, {dump}")
    return options


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"override must be a directory that exists, and {path} is none")
    return path


def _folder(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ValueError(f"dump must be a directory, and {path} is a file")
    return path


def options_of(caller: str, program: object, settings: Mapping[str, object]) -> Options:
    """Return the options of a call of `caller` with `program`.

    Args:
        settings: `mode`, `dynamic`, `fullgraph` and `options`, as for `fuse`.

    Raises:
        TypeError: `program` cannot be called, or a setting is unknown or has the wrong type.
        ValueError: unknown mode, option or value of an option.
    """
    unknown = set(settings) - {"mode", "dynamic", "fullgraph", "options"}
    if unknown:
        raise TypeError(f"{caller} takes mode, dynamic, fullgraph and options, got {sorted(unknown)}")
    if not callable(program) or isinstance(program, type):
        raise TypeError(f"{caller} takes an nn.Module or a function, got {program!r}")
    return Options.read(settings.get("mode"), settings.get("options"))  # type: ignore[arg-type]  # `read` tests the types


def torch_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Pick the settings that `torch.compile` takes.

    >>> torch_settings({"mode": "default", "dynamic": True})
    {'dynamic': True}
    """
    return {name: settings[name] for name in ("dynamic", "fullgraph") if name in settings}
