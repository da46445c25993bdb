"""Keeps what eager checks: positions out of range, data that an operation refuses, calls that are no calls.

checked         the check of a position, or of another requirement on data, and which one has failed
unused          results that nothing reads, but whose computation checks data
partly_read     results that are read in part, whose checks eager makes on all of them
read_boxes      the elements of tensors that a call certainly reads
refused_calls   calls that eager refuses although PyTorch traces them
"""
