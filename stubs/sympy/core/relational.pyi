from sympy import Expr
from sympy.logic.boolalg import Boolean

class Relational(Boolean):
    @property
    def args(self) -> tuple[Expr, ...]: ...

class Equality(Relational): ...

Rel = Relational
Eq = Equality
