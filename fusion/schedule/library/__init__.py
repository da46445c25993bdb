"""Chooses how matrix products are computed: one generated kernel, split-K, or the library."""
