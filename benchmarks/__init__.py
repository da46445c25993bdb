"""Benchmarks: `python -m benchmarks cpu|gpu|contractions|training|inference|dynamic|scheduling|opinfo|random`."""
