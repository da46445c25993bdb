"""Compiles captured regions into the modules that run, by the stages of `fusion/stages.py`.

    region           one region: its stages before autograd, and the choice between compilation, parts and eager
    autograd         forward and backward, or one graph for inference, by AOTAutograd
    graph_compiler   one ATen graph: from the cache, compiled, or left to eager
    compile          turns one ATen graph into a module: lowers, schedules, generates, builds, splices
    choose_externs   operations that stay library calls
    scheduling       schedules a Program: PROGRAM, CLUSTERS, LAUNCHES
    trials/          alternatives that are timed before one is chosen
    control_flow     the bodies of branches, loops and scans, as graphs of their own

`graphs` reads properties of ATen graphs.
"""
