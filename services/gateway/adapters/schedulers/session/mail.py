"""The messages that a gateway writes to its session, a gRPC stream, with a scheduler."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from stepwell.scheduler.v1 import scheduler_pb2

from services.gateway.adapters.schedulers.converters import inflight_to_proto
from services.gateway.core.request.inflight import Inflight

logger = logging.getLogger(__name__)

Mail = scheduler_pb2.SessionRequest | tuple[int, Inflight]
"""A message to send, or a sequence to send with its handle, the number that identifies it."""

_ADDED_BYTES = 64 * 1024
"""Limit on the size in bytes of a message with several sequences."""


def messages_of(
    outbox: Sequence[Mail], on_failed: Callable[[int], None]
) -> Iterator[scheduler_pb2.SessionRequest]:
    """Yields the messages to write, in order. Consecutive sequences are sent in one message,
    because each write of a message takes a few iterations of the event loop. Calls `on_failed` with
    the handle of a sequence that cannot be encoded, because of a defect, and does not send it.
    """
    adds: list[scheduler_pb2.AddRequest] = []
    num_bytes, now = 0, asyncio.get_running_loop().time()
    for mail in outbox:
        add: scheduler_pb2.AddRequest | None = None
        if isinstance(mail, tuple):
            try:
                add = inflight_to_proto(*mail, now)
            except (TypeError, ValueError):
                logger.exception("defect while encoding a request for a scheduler")
                on_failed(mail[0])
                continue
        more_bytes = 0 if add is None or len(outbox) == 1 else add.ByteSize()
        if adds and (add is None or num_bytes + more_bytes > _ADDED_BYTES):
            yield _message_of(adds)
            adds, num_bytes = [], 0
        if add is not None:
            adds.append(add)
            num_bytes += more_bytes
        elif not isinstance(mail, tuple):
            yield mail
    if adds:
        yield _message_of(adds)


def _message_of(adds: Sequence[scheduler_pb2.AddRequest]) -> scheduler_pb2.SessionRequest:
    if len(adds) == 1:
        return scheduler_pb2.SessionRequest(add=adds[0])
    return scheduler_pb2.SessionRequest(adds=scheduler_pb2.AddRequests(requests=adds))
