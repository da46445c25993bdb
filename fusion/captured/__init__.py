"""What Dynamo captured: looked at, and changed in place, before anything is derived from it.

What enters is Dynamo's graph, in which operations write to memory as the program does.  Refused are `shared_writes`,
whose result eager does not define.  Floats that belong to the program become numbers (`settings`), casts that the trace
would lose stand in the graph (`autocast`), and rows that nobody reads are not made (`unread`).
"""
