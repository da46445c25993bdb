"""Diagnosis: whether a program agrees with eager (`verification`), whether it would for other inputs (`certifying`),
and which kernel or pass makes it differ (`bisection`).

    parts.py          the change of a pass, cut out of a Program with inputs of its own
    adversarial.py    inputs on which derivations break
    rewrites.py       both forms of a part, and the kernel of each launch, on such inputs
"""
