"""Chooses memory layouts of copies, scattered results, rounded maps and rows (Program → Program)."""
