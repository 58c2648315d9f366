"""Sources that update the index of cached prefixes: Redis, or the event streams of KV pools."""
