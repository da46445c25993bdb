"""Emits folds, prefixes and updates of memory as lines of Triton.

A fold is reduced at once or kept per lane until its loop ends (`reduce`); its own loop may need its running value
(`running_folds`).  A prefix is a scan (`prefix`).  A store at points whose indices may collide is an atomic operation
(`updates`).
"""
