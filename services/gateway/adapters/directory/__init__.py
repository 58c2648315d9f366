"""Sources that keep the index of cached prefixes up to date: Redis, or the pools themselves."""
