"""Passes over the joint graph: what is decided about forward and backward together, before they are parted.

Input: the functional ATen graph of both, as AOTAutograd traces it.  Each pass changes it in place and keeps its
results, up to rounding.  `fusion/stages.py` has them in their order (JOINT, PARTED, INFERENCE):

1. layout: gradients as their inputs lie (`layout`), complex numbers as pairs (`complex_pairs`), the strides that
   convolutions and norms want (`channels_last`, `row_layouts`, by `layout_plans`), seeds that checkpoints share
   (`seeds`);
2. views that only autograd knows of go (`detached`), as do copies that lie alike (`copies`), and widths of heads become
   numbers (`head_widths`);
3. gradients of maxima that cancel are dropped (`maxima`), those of products too large to keep are computed in forward
   (`loss_gradients`), and sums that the graph holds in another order of summation are taken from there (`reassociate`);
4. forward compares floats for equality (`comparisons`), and keeps positions in few bytes (`positions`);
5. what backward makes again is marked (`recomputation`: `saved_inputs`, `large_products`, copies for their products);
6. forward returns what only backward needs (`results`), and repeated nodes are merged (`repeated`).

Once the graph is parted, `saved` settles what backward gets of forward, and in which precision.
"""
