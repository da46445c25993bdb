"""Serves the calls of compiled programs: fallbacks, reports, progress and hooks into Dynamo.

prewarm      Dynamo begins to trace for this backend: targets are prepared, PyTorch's shape functions corrected
callers      the program for which a region runs, because equal programs share their compiled code
uncaptured   a warning if Dynamo captures no operation of a program
fallback     eager in place of a region that cannot be compiled, with a warning
reports      the report of each graph, in order, from any thread
waiting      the progress line on the terminal during a long compilation
"""
