"""The lowering rules, one module per family of operations.  Importing this package registers them all."""

from lowering.rules import contraction, pointwise, view

__all__ = ["contraction", "pointwise", "view"]
