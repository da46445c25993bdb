"""Benchmarks: `python -m benchmarks cpu|gpu|scheduling|opinfo`."""
