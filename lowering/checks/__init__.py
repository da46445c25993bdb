"""Implements eager's checks: indices out of range, invalid data, calls that eager refuses.

checked         the check of an index, or of another requirement on data, and the search for the one that failed
unused          results that nothing reads, but whose computation checks data
partly_read     results that are read in part, although eager checks all of their elements
read_boxes      the elements of tensors that a call certainly reads
refused_calls   calls that eager refuses although PyTorch traces them
"""
