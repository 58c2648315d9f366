"""Benchmarks of the directory of cached prefixes in Redis, and of a gateway's index of it."""
