"""Benchmarks of the directory of cached prefixes: its size in Redis, its writes, and the index that
reads it.
"""
