"""Compares a program with eager, on its own and on adversarial inputs, and finds the cause of differences.

verification.py   compares the results with eager's
certifying.py     tests kernels and rewrites on adversarial inputs
bisection.py      finds the kernel or the pass that makes results differ
pass_changes.py   extracts the nodes that a pass changed as Programs with inputs of their own
adversarial.py    draws inputs on which derivations break
rewrites.py       compares both forms of such a part, and the kernel of each launch, on these inputs
"""
