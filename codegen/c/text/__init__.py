"""Writes the elements of a C kernel: expressions, indices, folds, stores and the functions they call.

An expression with its precedence (`code`), the type of a dtype in memory (`storage`), operations (`operations`) and
indices (`indices`), the functions that a text may call (`prelude`; of floats `functions`, of C's library `library`,
small GEMMs `products`); `nest` holds lines at the level of their loop, and `values` writes whole expressions there,
each as far out of the loops as possible.  `folds` writes folds, and stores.
"""
