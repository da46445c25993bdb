"""How a reduction is walked: in one walk or several, in parts, in scans, without the blocks that a mask skips."""
