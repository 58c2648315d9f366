"""Errors of the worker's core.

InvalidArgument
└── InvalidStep          a step contradicts the batch or the limits
StepwellError
├── KVCacheTooSmall      the reserved memory cannot contain one sequence
├── NoTier               blocks cannot be offloaded
└── NoSpeculation        drafts cannot be proposed or verified
Unavailable
└── DeviceFailed         the device works again only in a new process
"""

from services.common.errors import InvalidArgument, StepwellError, Unavailable


class InvalidStep(InvalidArgument):
    """A step contradicts the batch, the worker's limits, or the steps of other ranks."""

    reason = "INVALID_STEP"

    @classmethod
    def in_field(cls, step: int, field: str, problem: str) -> "InvalidStep":
        """The error for a problem in one field of the message of step number `step`."""
        return cls(f"step {step}: {field}: {problem}", field=field)


class KVCacheTooSmall(StepwellError):
    """The memory for keys and values cannot hold one sequence of the configured length."""

    reason = "KV_CACHE_TOO_SMALL"


class NoTier(StepwellError):
    """KV blocks cannot be offloaded on this device, or to the configured amount of memory."""

    reason = "NO_TIER"


class NoSpeculation(StepwellError):
    """The model or its parallelism cannot verify drafts, or this machine cannot propose them."""

    reason = "NO_SPECULATION"


class DeviceFailed(Unavailable):
    """The device computes nothing any more in this process, as after a fault of a CUDA kernel."""

    reason = "DEVICE_FAILED"
