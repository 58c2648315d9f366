"""Converts failed allocations into one error that names a remedy."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import StepwellError


class NotEnoughMemory(StepwellError):
    """The machine or device lacks memory for the weights, the KV cache or a step."""

    reason = "NOT_ENOUGH_MEMORY"


_OUT_OF_MEMORY = re.compile(
    "out of memory|can(no|')t allocate memory|not enough memory", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch on the CPU, or torch on CUDA could not allocate memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Within this context, a failed allocation raises NotEnoughMemory with `what` and `remedy`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise NotEnoughMemory(f"there is not enough memory for {what}; {remedy}") from error
