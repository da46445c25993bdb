"""Decides how reductions are computed: in one loop or several, in parts, in scans, without blocks that a mask skips."""
