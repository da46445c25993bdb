"""Compiles what Dynamo captured, from the region to the module that runs, by the stages of `fusion/stages.py`.

    region           one region: its stages before autograd, and the choice between compilation, parts and eager
    autograd         forward and backward, or one graph for inference, by AOTAutograd
    graph_compiler   one ATen graph: from the cache, compiled, or left to eager
    compile          one ATen graph to a module: lowered, scheduled, generated, built, spliced
    choose_externs   operations that stay library calls
    scheduling       a Program to a schedule: PROGRAM, CLUSTERS, LAUNCHES
    trials/          alternatives that are timed before one is chosen
    control_flow     the bodies of branches, loops and scans, as graphs of their own

`graphs` reads facts from ATen graphs.
"""
