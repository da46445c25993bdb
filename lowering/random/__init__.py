"""Draws random numbers: `philox` from counters, as kernels do; `seeded` from PyTorch's generators, repeatably."""
