"""Sources that update the index of cached prefixes: Redis, or the pools' own events."""
