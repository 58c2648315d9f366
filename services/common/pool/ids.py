"""Ids that the scheduler and the kvpool exchange."""

from typing import NewType

# The index of a KV-cache block in the workers' KV tensors.
BlockId = NewType("BlockId", int)

# The number that the scheduler assigns to a request. Unique until the pool is opened again.
RequestKey = NewType("RequestKey", int)

# The number, at least 1, of a context: the blocks that an ended request leaves for a later request.
ContextId = NewType("ContextId", int)

# The name of a pool, usually the name of its replica.
PoolId = NewType("PoolId", str)

NULL_BLOCK = BlockId(0)
"""The null block, which is never allocated. Its id fills block table entries that are not read."""

MAX_GENERATION = 2**62
"""Larger than any generation number of a pool, since these are about the microseconds since 1970 at
the pool's last opening.
"""
