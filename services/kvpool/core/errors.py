"""Errors of the pool.

InvalidArgument       InvalidPool, UnsupportedGroup; MalformedTransaction (services.common)
NotFound              PoolNotFound
ResourceExhausted     TooManyPools
FailedPrecondition    RequestNotAdmitted, RequestAlreadyAdmitted, StaleGeneration, OutOfSequence
Aborted               TakenOver
Unavailable           Draining
"""

from services.common.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)


class InvalidPool(InvalidArgument):
    """No pool can have this shape."""

    reason = "INVALID_POOL"


class UnsupportedGroup(InvalidArgument):
    """The attention of a group is of a kind that this pool does not serve."""

    reason = "UNSUPPORTED_GROUP"


class PoolNotFound(NotFound):
    """There is no open pool of that name."""

    reason = "POOL_NOT_FOUND"


class TooManyPools(ResourceExhausted):
    """One more pool would be more than the process may keep."""

    reason = "TOO_MANY_POOLS"


class RequestNotAdmitted(FailedPrecondition):
    """The request holds no blocks here; nothing of the transaction is done."""

    reason = "REQUEST_NOT_ADMITTED"


class RequestAlreadyAdmitted(FailedPrecondition):
    """The request holds blocks already; nothing of the transaction is done."""

    reason = "REQUEST_ALREADY_ADMITTED"


class StaleGeneration(FailedPrecondition):
    """The pool was opened again since: the caller names an earlier generation."""

    reason = "STALE_GENERATION"


class OutOfSequence(FailedPrecondition):
    """Neither the next transaction nor the last one again."""

    reason = "OUT_OF_SEQUENCE"


class TakenOver(Aborted):
    """A newer stream sends the transactions of the pool."""

    reason = "TAKEN_OVER"


class Draining(Unavailable):
    """The process is about to end; streams that never end by themselves end now."""

    reason = "DRAINING"
