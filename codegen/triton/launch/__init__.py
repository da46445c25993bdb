"""Turns the text of a generated file into a callable.

`load` imports it, `aot` compiles it, `build` prepares it to be launched by one of the `launchers`, most of them in one
call (`direct`); `sources` are the texts of one kernel, for tensors that are not aligned and for sizes beyond 32 bits;
`counters` allocates the memory in which programs count themselves.  Under `TRITON_INTERPRET=1` the same text runs on
the CPU (`interpreted`), including its assembly (`ptx`).
"""
