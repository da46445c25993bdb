"""`F.scaled_dot_product_attention`: the library's kernel, or its parts, from which kernels are generated.

`call` reads a call in Dynamo's graph, `price` predicts the time of either, `choose` decides.  The decision is taken
before forward and backward are traced, so that backward is the gradient of what runs forward.
"""

from fusion.attention.choose import Choice, Chooser

__all__ = ["Choice", "Chooser"]
