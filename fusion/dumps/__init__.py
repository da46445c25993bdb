"""Writes files of kernels and graphs that run by themselves, and holds the functions that they import.

folders        the folder in which a process writes its dumps
trace          the files that a compilation writes, in order
kernel_files   the file of a kernel: source, inputs, reference; written by a dump, read by itself and by `override`
graph_files    the files of a graph and of its compiled module; `fx_text` writes the names and attributes of their code
ranges         the values that integer inputs may hold, from the checks of kernels
inputs         the input tensors that a file creates
checks         the results of a launch against the evaluator in float64
running        runs the file of a kernel
graph_running  runs the files of graphs and modules
"""

from fusion.dumps.graph_running import allocator, constant, in_chunks, kernel, module_of, run_graph, run_module
from fusion.dumps.running import run_kernel

__all__ = ["allocator", "constant", "in_chunks", "kernel", "module_of", "run_graph", "run_kernel", "run_module"]
