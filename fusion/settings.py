"""Reads the settings of functions that run a program once: `explain`, `accuracy`, `verify`, `bisect`."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.options import Options


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
    return Options.read(settings.get("mode"), settings.get("options"))  # type: ignore[arg-type]  # read checks


def torch_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Pick the settings that `torch.compile` takes.

    >>> torch_settings({"mode": "default", "dynamic": True})
    {'dynamic': True}
    """
    return {name: settings[name] for name in ("dynamic", "fullgraph") if name in settings}


__all__ = ["options_of", "torch_settings"]
