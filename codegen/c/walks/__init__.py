"""Walks: what is decided about a kernel before a line of it is written.

Which axes of its grid are loops inside a program (`repeated`), which statements share a walk over the others
(`sweeps`), along which axis the lanes run (`lanes`), where their loops are cut so that nothing is masked (`cuts`) or
have nothing to do (`idle`), what is kept for a later walk (`scratch`), and whether threads pay (`threads`).
"""
