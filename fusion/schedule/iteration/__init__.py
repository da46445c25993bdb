"""Defines the vocabulary of the scheduler: iteration spaces, axes, the dependence graph, names."""
