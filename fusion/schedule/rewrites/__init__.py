"""Rewrites a Program by local algebra: inlining, differences of powers, one-hot sums, windows."""
