"""The emulated network: one law of a link, and two nets that obey it (sockets, memory)."""
