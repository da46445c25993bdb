"""Runs the passes of a stage on its subject; `fusion/stages.py` lists the stages.

contexts   what passes change, and the context that they may query
adapters   hand functions the parts of a subject and of a context that they take
passes     the runner, which checks, times and dumps each pass
"""
