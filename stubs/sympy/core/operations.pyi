from collections.abc import Sequence

from sympy import Basic, Expr

class AssocOp(Basic):
    @classmethod
    def make_args(cls, expr: Expr) -> tuple[Expr, ...]: ...
    @classmethod
    def _from_args(cls, args: Sequence[Expr]) -> Expr: ...

class LatticeOp(AssocOp): ...
