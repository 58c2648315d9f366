"""Events of the prefix cache (which blocks the pool caches or evicts), with the tokens of each
block, for routers of other projects.
"""
