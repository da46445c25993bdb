"""Loops: which blocks of a loop have to be walked at all.

Read from the condition of the loop: what follows from indices alone in `skips`, what memory is asked for in `scan`.
"""
