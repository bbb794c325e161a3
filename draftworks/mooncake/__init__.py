"""Mooncake: its library as seen from here, the process that owns the memory, and the service that starts and watches it."""
