"""Defines the two IRs, Program and Kernel, and the vocabulary that they share.

program        nodes over named axes; a `chunks` node holds Programs that run for some points at a time
kernel         a loop nest over named axes; `prefixes` places the scans in it
expr           the computation of one element, over `scalar_ops`
division       `//` and `%` of indices; `affine`: symbols, strides and extents; `sizes`: size symbols
requirements   conditions on data, and `error_messages`, eager's error messages: both are operands of the check
arguments      nested arguments of calls
"""
