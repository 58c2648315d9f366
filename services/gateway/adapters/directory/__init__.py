"""What keeps the index of cached prefixes up to date: Redis, or the pools themselves."""
