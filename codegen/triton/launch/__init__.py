"""Launch: the text of a generated file as something to call.

`load` imports it, `aot` compiles it, `build` makes it ready to be launched by one of the `launchers`, most of them in
one call (`direct`); `counters` are what programs count themselves in.  Under `TRITON_INTERPRET=1` the same text runs on
the CPU (`interpreted`), its assembly too (`ptx`).
"""
