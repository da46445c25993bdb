"""Launch: the text of a generated file as something to call.

`load` imports it, `aot` compiles it, `build` makes it ready to be launched by one of the `launchers`, most of them in
one call (`direct`); `sources` are those of one kernel, for tensors that are not aligned and for sizes beyond 32 bits;
`counters` are what programs count themselves in.  Under `TRITON_INTERPRET=1` the same text runs on the CPU
(`interpreted`), its assembly too (`ptx`).
"""
