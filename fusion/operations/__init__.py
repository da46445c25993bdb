"""Operations of our own, which passes put into graphs beside those of ATen; what was compiled calls them as they are.

Each is an ordinary function of tensors (`ownership.take_over`, `products.aligned_product`), known to whoever reads a
graph, before and after it is compiled, and needs nothing else of this package.
"""
