"""Ids that scheduler and kvpool exchange."""

from typing import NewType

# Index of a block in the KV tensors.
BlockId = NewType("BlockId", int)

# Chosen by the scheduler for each request; not used twice in a generation of the pool.
RequestKey = NewType("RequestKey", int)

# Name of a pool, usually that of its replica.
PoolId = NewType("PoolId", str)

NULL_BLOCK = BlockId(0)
"""Is never allocated. Fills entries of a block table that are not read."""

MAX_GENERATION = 2**62
"""Above all generations of a pool: microseconds since 1970 reach it in 146,000 years."""
