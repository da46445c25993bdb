"""Benchmarks: `python -m benchmarks cpu|gpu|contractions|training|inference|modes|dynamic|scheduling|opinfo|random`."""
