"""From fx graphs to Programs: the two IRs, sympy indexing, the rules for ATen operations, verifier, evaluator,
printer.
"""
