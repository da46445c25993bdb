"""Statements: a fold, a prefix or an update of memory as lines of Triton.

A fold is reduced at once or kept until its loop ends (`reduce`); its own loop may follow it (`follow`).  A prefix is a
scan (`prefix`).  What is written where points may meet is an atomic operation (`updates`).
"""
