"""What Dynamo captured: looked at, and changed in place, before anything is derived from it.

What enters is Dynamo's graph, in which operations write to memory as the program does (`writes` says which).  Refused
are `shared_writes`, whose result eager does not define.  Calls of marked regions become their operations (`regions`),
floats that belong to the program become numbers (`settings`), casts that the trace would lose stand in the graph
(`autocast`), what lies between windows that are written is kept (`windows`), what a program asks of data for the sake
of speed alone is answered (`hints`), and rows that nobody reads are not made (`unread`).  `tangents` says how gradients
of results will lie in memory.
"""
