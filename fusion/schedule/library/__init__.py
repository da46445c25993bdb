"""Who computes a matrix product: one generated kernel, split-K, or the library."""
