from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory for the KV cache: `of_bytes` * `utilization` - `used_bytes` - `activation_bytes`."""

    of_bytes: int
    """This rank's fraction of the memory available after loading, or of the GPU's memory."""
    utilization: float
    activation_bytes: int
    """Bytes that the largest step needs in addition to the weights and the KV cache."""
    used_bytes: int = 0
    of_what: str = "available after loading"
    """What `of_bytes` is, for the sentence that explains the KV cache's size."""
