"""Generates skinny GEMMs that read each weight from memory once: recognised by `plan`, written by `function`."""

from fusion.codegen.c.streams.function import stream_functions
from fusion.codegen.c.streams.plan import plan_of

__all__ = ["plan_of", "stream_functions"]
