"""Plans a kernel before any of its text is written.

Which axes of its grid are loops inside a program (`repeated`) and which very short one is written out (`unrolled`),
which statements share a loop over the others (`sweeps`), along which axis the lanes run (`lanes`), where their loops
are split so that nothing is masked (`cuts`) or has no effect (`idle`), which values are kept for a later loop
(`scratch`), and whether threads pay (`threads`).
"""
