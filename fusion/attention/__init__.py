"""Chooses between the library's kernel and generated kernels for a call of `F.scaled_dot_product_attention`.

`call` reads a call in Dynamo's graph, `price` predicts the time of either, `choose` decides.  The decision precedes the
tracing of forward and backward, so that backward is the gradient of the chosen forward.
"""

from fusion.attention.choose import Choice, Chooser

__all__ = ["Choice", "Chooser"]
