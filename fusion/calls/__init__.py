"""Serves the calls of compiled programs around their compilation: what a call finds, and what it shows.

prewarm      Dynamo begins to trace for this backend: targets are prepared, PyTorch's shape functions corrected
callers      the program for which a region runs, since equal programs share their compiled code
uncaptured   a warning where Dynamo captures nothing of a program
fallback     eager in place of a region that cannot be compiled, with a warning
reports      the report of each graph, in order, from any thread
waiting      a line on the terminal, during a long compilation
"""
