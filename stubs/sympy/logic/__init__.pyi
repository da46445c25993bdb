from sympy.logic import boolalg as boolalg
