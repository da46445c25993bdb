"""How a reduction is computed: in one loop or several, in parts, in scans, without the blocks that a mask skips."""
