"""Settings of a scheduler with a connector. Names follow vLLM's KVTransferConfig."""

import enum


class KVRole(enum.Enum):
    """The direction in which keys and values are transferred."""

    BOTH = "kv_both"
    CONSUMER = "kv_consumer"
    PRODUCER = "kv_producer"


class KVLoadFailurePolicy(enum.Enum):
    """What happens to a request if the load of some of its blocks failed."""

    RECOMPUTE = "recompute"
    """The request is computed again from the first block whose load failed."""
    FAIL = "fail"
    """The request ends with an error."""
