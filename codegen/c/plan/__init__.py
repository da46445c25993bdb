"""Plans a kernel before any of its text is written.

Which axes of its grid are loops inside a program (`repeated`) and which very short one is written out (`unrolled`),
which statements share a loop over the others (`loop_fusion`), along which axis the lanes run (`lanes`), where their
loops are split so that nothing is masked (`index_set_splitting`, `strip_mining`) or end where folds have an effect
(`loop_bounds`), which values are kept for a later loop (`scratch`), which rows are fetched before (`prefetch`), and
whether threads pay (`threads`).
"""
