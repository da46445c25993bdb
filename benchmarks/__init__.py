"""Benchmarks: `python -m benchmarks cpu|gpu|contractions|training|scheduling|opinfo|random`."""
