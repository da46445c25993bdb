"""Runs PyTorch's own table of operations (`op_db`, the OpInfos) through the compiler.

pairs.py       which operations, dtypes and samples
calls.py       one sample as a function of its tensors, and the ways to run it
tolerances.py  the allowed difference to eager
verdict.py     the verdict on one (operation, dtype): right or not, and by whose kernels
table.py       the verdicts on many, stored as JSON lines and shown as a table
"""
