from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that the cache may use: `of_bytes` times `utilization`, minus `used_bytes` and
    `activation_bytes`.
    """

    of_bytes: int
    """This rank's share of the memory that was available after loading, or of the GPU's memory."""
    utilization: float
    activation_bytes: int
    """Bytes that the largest step needs in addition to weights and cache."""
    used_bytes: int = 0
    of_what: str = "available after loading"
    """Describes `of_bytes` in the explanation, after the number of bytes."""
