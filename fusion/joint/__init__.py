"""Rewrites the joint graph: decisions about forward and backward together, before the graph is partitioned.

Input: the functional ATen graph of both, as AOTAutograd traces it.  Each pass changes it in place and keeps its
results, up to rounding.  `fusion/stages.py` lists them in order (JOINT, PARTITIONED, INFERENCE):

1. layout: gradients in the layout of their inputs (`layout`), complex numbers as pairs (`complex_pairs`), the strides
   that convolutions and norms prefer (`channels_last`, `row_layouts`, by `layout_plans`), seeds that checkpoints share
   (`seeds`);
2. detached views are removed (`detached`), as are copies with their source's layout (`copies`), and widths of heads
   are specialised (`head_widths`);
3. gradients of maxima that cancel are removed (`maxima`), gradients of products too large to keep are computed in
   forward (`loss_gradients`), and sums that the graph holds in another order of summation are reused (`reassociate`);
4. forward compares floats for equality (`comparisons`), and saves positions in few bytes (`positions`);
5. values to recompute in backward are marked (`recomputation`): views of inputs, large products and copies for them;
6. forward returns values that only backward needs (`results`), and repeated nodes are merged
   (`common_subexpressions`).

Once the graph is partitioned, `saved` decides which values forward saves for backward, and in which precision.
"""
