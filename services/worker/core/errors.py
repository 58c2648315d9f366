"""Errors of the worker's core.

InvalidArgument
└── InvalidStep          a step contradicts the batch or the limits
StepwellError
├── KVCacheTooSmall      the memory set aside cannot hold one sequence
├── NoTier               offloaded blocks cannot be kept
└── NoSpeculation        drafts cannot be proposed or verified
"""

from services.common.errors import InvalidArgument, StepwellError


class InvalidStep(InvalidArgument):
    """A step contradicts the batch or the worker's limits. No part of the step was applied."""

    reason = "INVALID_STEP"


class KVCacheTooSmall(StepwellError):
    """The memory for keys and values cannot hold one sequence of the configured length."""

    reason = "KV_CACHE_TOO_SMALL"


class NoTier(StepwellError):
    """Offloaded keys and values cannot be kept on this device or in this amount of memory."""

    reason = "NO_TIER"


class NoSpeculation(StepwellError):
    """Speculation is not possible: the model or its division among workers does not allow drafts to
    be verified, or this machine has no code that proposes them.
    """

    reason = "NO_SPECULATION"
