"""Program → Program for the sake of memory: where copies, scattered results, rounded maps and rows lie."""
