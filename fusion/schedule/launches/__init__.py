"""Launches: what is done to the kernels of a schedule once they are made: joined, packed, written in place."""
