"""Matrix products: one generated kernel, split-K, or the library."""
