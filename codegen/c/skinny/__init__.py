"""Generates skinny GEMMs that read each weight from memory once: recognised by `plan`, written by `function`."""

from fusion.codegen.c.skinny.function import skinny_functions
from fusion.codegen.c.skinny.plan import plan_of

__all__ = ["plan_of", "skinny_functions"]
