"""Events of the prefix cache (which blocks the pool caches or evicts), with the tokens of each
block, for routers of other projects. The pool stores only hashes of blocks, and the scheduler
stores the tokens. `recorder` combines hashes and tokens, and `log` stores the latest events for
publishers.
"""
