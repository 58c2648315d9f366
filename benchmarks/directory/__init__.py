"""Benchmarks of the directory of cached prefixes in Redis: its size, its writes, and the gateway's
index, which is built from it.
"""
