"""Program → Program: memory layouts of copies, scattered results, rounded maps and rows."""
