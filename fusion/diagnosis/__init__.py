"""Determines whether a program agrees with eager, would for other inputs, and which pass or kernel makes it differ.

verification.py   whether results agree with eager
certifying.py     whether they would for other inputs
bisection.py      the kernel or the pass that makes them differ
pass_changes.py   the change of a pass, cut out of a Program with inputs of its own
adversarial.py    inputs on which derivations break
rewrites.py       both forms of a part, and the kernel of each launch, on such inputs
"""
