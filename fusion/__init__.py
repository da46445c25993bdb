"""Fusion: PyTorch programs in, the same programs out with their subgraphs as generated block kernels."""
