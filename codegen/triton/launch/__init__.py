"""Launch: the text of a generated file as something to call.

`load` imports it, `aot` compiles it, `build` makes a launcher of what was compiled; `counters` are what programs count
themselves in.  Under `TRITON_INTERPRET=1` the same text runs on the CPU (`interpreted`), its assembly too (`ptx`).
"""
