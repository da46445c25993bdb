"""Inspection: the `report` of a compilation, its graph `breaks`, the dumps of its `trace`, the `accuracy` of its
kernels, and `progress` of commands.
"""
