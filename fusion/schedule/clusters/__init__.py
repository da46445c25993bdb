"""Decides which nodes become one kernel: `growth` along the most profitable edge, `legality`, `profit`."""
