"""Runs the passes of a stage on its subject; `fusion/stages.py` lists the stages.

contexts   the objects that passes change, and the context that they may query
adapters   wrap functions as passes: each gets the parts of the subject and of the context that it takes
passes     the runner, which checks, times and dumps each pass
"""
