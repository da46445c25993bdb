"""PyTorch's own table of operations (`op_db`, the OpInfos) through the compiler.

pairs.py       which operations, dtypes and samples
calls.py       one sample as a function of its tensors, and the ways to run it
tolerances.py  how near to eager is near enough
verdict.py     what became of one (operation, dtype): right or not, and by whose kernels
table.py       the verdicts of many, kept as json lines and shown as a table
"""
