"""Defines the operations that passes insert in addition to those of ATen; compiled modules call them directly.

Each is an ordinary function of tensors (`ownership.take_over`, `products.aligned_product`) that passes know in graphs,
and depends on nothing else in this package.
"""
