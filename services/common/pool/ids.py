"""Ids that the scheduler and the kvpool exchange."""

from typing import NewType

# The index of a block in the KV tensors.
BlockId = NewType("BlockId", int)

# Chosen by the scheduler for each request. Unique within a generation of the pool.
RequestKey = NewType("RequestKey", int)

# Chosen by the scheduler for the retained blocks of a request. At least 1.
ContextId = NewType("ContextId", int)

# The name of a pool, usually the name of its replica.
PoolId = NewType("PoolId", str)

NULL_BLOCK = BlockId(0)
"""The null block. It is never allocated and fills block table entries that are not read."""

MAX_GENERATION = 2**62
"""Exceeds every generation of a pool, which are microseconds since 1970."""
