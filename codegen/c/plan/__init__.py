"""Plans a kernel before any of its text is written.

It decides which axes of the grid are loops inside a program (`repeated`), which very short axis is unrolled
(`unrolled`), which statements share a loop over the others (`loop_fusion`), which axis is vectorised (`lanes`), where
loops are split so that no lane is masked (`index_set_splitting`, `strip_mining`), which range of a loop affects its
folds (`loop_bounds`), after how many points it ends (`loop_ends`), which values are kept for a later loop (`scratch`),
which rows are prefetched (`prefetch`), and whether threads are profitable (`threads`).
"""
