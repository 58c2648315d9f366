"""The names that things in a pool go by."""

from typing import NewType

# A block, by its place in the KV tensors.
BlockId = NewType("BlockId", int)

# A request, by the number that the scheduler chose; unique among those alive in a generation.
RequestNumber = NewType("RequestNumber", int)

# A pool, usually by its replica's name.
PoolId = NewType("PoolId", str)

# Takes part in no allocation: what a table holds where there is nothing to read.
NULL_BLOCK = BlockId(0)
