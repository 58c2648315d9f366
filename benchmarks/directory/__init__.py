"""The directory of cached prefixes: its bytes in Redis, its writes, and the index that reads it."""
