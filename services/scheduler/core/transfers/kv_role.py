"""How a scheduler with a connector behaves. Names are vLLM's, of KVTransferConfig."""

import enum


class KVRole(enum.Enum):
    """Which way keys and values go."""

    BOTH = "kv_both"
    CONSUMER = "kv_consumer"
    PRODUCER = "kv_producer"


class KVLoadFailurePolicy(enum.Enum):
    """What happens to a request some of whose blocks were not loaded."""

    RECOMPUTE = "recompute"
    """It computes from the first such block on."""
    FAIL = "fail"
    """It ends."""
