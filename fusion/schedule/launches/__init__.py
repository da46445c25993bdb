"""Launches: what is done to the kernels of a schedule once they are made, to save launches, memory and precision.

A kernel goes on where another one ends (`chain`), or where a tile of it ends (`tiles`); independent ones run side by
side (`pack`); means are summed up from an element on (`pivots`); at last, results go where a tensor of the caller
(`updates`) or an operand (`reuse`) lies (`redirect`).  `launch` puts two kernels under one list of parameters.
"""
