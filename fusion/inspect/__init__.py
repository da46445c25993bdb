"""Seeing inside: the `report` of a compilation, its `breaks`, the dumps of its `trace`, and `progress` of commands."""
