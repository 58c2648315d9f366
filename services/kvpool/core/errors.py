"""Errors of the pool."""

from services.common import errors


class InvalidPool(errors.InvalidArgument):
    reason = "INVALID_POOL"


class UnsupportedGroup(errors.InvalidArgument):
    """The pool does not support the attention type or parameters of a group."""

    reason = "UNSUPPORTED_GROUP"


class PoolNotFound(errors.NotFound):
    """No open pool has this name."""

    reason = "POOL_NOT_FOUND"


class TooManyPools(errors.ResourceExhausted):
    """The process has its maximum number of open pools."""

    reason = "TOO_MANY_POOLS"


class RequestNotAdmitted(errors.FailedPrecondition):
    """The request has no blocks in this pool. No operation of the transaction is applied."""

    reason = "REQUEST_NOT_ADMITTED"


class RequestAlreadyAdmitted(errors.FailedPrecondition):
    """The request already has blocks. No operation of the transaction is applied."""

    reason = "REQUEST_ALREADY_ADMITTED"


class StaleGeneration(errors.FailedPrecondition):
    """The caller names an earlier generation, but the pool was opened again since then."""

    reason = "STALE_GENERATION"


class OutOfSequence(errors.FailedPrecondition):
    """The transaction's number is not the next one, and not the last one, which may be repeated."""

    reason = "OUT_OF_SEQUENCE"


class TakenOver(errors.Aborted):
    """A newer stream now sends the transactions of this pool."""

    reason = "TAKEN_OVER"


class Draining(errors.Unavailable):
    """The process is shutting down and ends the streams of events."""

    reason = "DRAINING"
