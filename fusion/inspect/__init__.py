"""Seeing inside: the `report` of a compilation, its `breaks`, the dumps of its `trace`, the `accuracy` of its kernels,
and `progress` of commands.
"""
