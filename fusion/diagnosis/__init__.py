"""Diagnosis: whether a program computes what eager computes (`verification`), would do so for other inputs
(`certifying`), and what makes it differ (`bisection`).

    parts.py          the change of a pass, cut out of a Program with inputs of its own
    adversarial.py    inputs on which derivations break
    rewrites.py       both forms of a part, and the kernel of each launch, on such inputs
"""
