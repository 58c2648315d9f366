"""Measures a serialized message before it is parsed, since parsing blocks the event loop.

A message of 4 MB can contain two million empty messages, whose parsing takes 70 ms and 100 MB.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.common.errors import Aborted, InvalidArgument, OutOfRange

MAX_FIELDS = 4_000
_BYTES_OF_VARINT = 5


def check_message(raw: bytes, kind: type[Message], max_items: int) -> None:  # noqa: PLR0912
    """Raises OutOfRange if a message has too many fields, or too many items in packed lists. Does
    not check that the bytes are a valid message.
    """
    if len(raw) <= 2 * MAX_FIELDS:  # A field has two bytes or more.
        return
    num_fields = num_packed = 0
    left: list[tuple[int, int, Any]] = [(0, len(raw), kind.DESCRIPTOR)]
    while left:
        place, end, descriptor = left.pop()
        while place < end:
            tag = raw[place]
            if tag < 0x80:  # most tags have one byte, and calling _varint would double the time
                place += 1
            else:
                tag, place = _varint(raw, place, end)
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise OutOfRange(f"the message has more than {MAX_FIELDS} fields")
            field = descriptor.fields_by_number.get(tag >> 3)
            match tag & 7:
                case 0:
                    _, place = _varint(raw, place, end)
                case 1:
                    place += 8
                case 5:
                    place += 4
                case 2:
                    size, place = _varint(raw, place, end)
                    if field is not None and field.message_type is not None:
                        left.append((place, min(place + size, end), field.message_type))
                    elif field is not None and _is_packed(field):
                        num_packed += size
                        if num_packed > _BYTES_OF_VARINT * max_items:
                            raise OutOfRange(
                                f"{field.name}: the message holds more than {max_items} items",
                                field=field.name,
                            )
                    place += size


def _is_packed(field: FieldDescriptor) -> bool:
    return field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _varint(raw: bytes, place: int, end: int) -> tuple[int, int]:
    """Returns a number and the position after it, or 0 and `end` if the number is incomplete."""
    value = shift = 0
    while place < end and shift < 70:
        byte = raw[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    return 0, end


_SLOTS = 16


class MessageReaders:
    """Reads request messages. The number of concurrent reads is limited, because each unfinished
    message may occupy as much memory as the longest allowed message. Slots are assigned in order of
    arrival.
    """

    def __init__(self, timeout_seconds: float, pressed_seconds: float = 1.0) -> None:
        """A read that has a slot may take `timeout_seconds`. While other reads wait for a slot, it
        may take only `pressed_seconds`.
        """
        self._timeout_seconds = timeout_seconds
        self._pressed_seconds = pressed_seconds
        self._num_waiting = 0
        self._slots = asyncio.Semaphore(_SLOTS)
        self._reads: deque[tuple[float, asyncio.Timeout]] = deque()
        """Start time and timeout of each read that has a slot, the oldest first."""

    async def read(self, messages: AsyncIterator[bytes]) -> bytes:
        """Reads the first message of a call. Raises Aborted if the message does not arrive in time,
        and InvalidArgument if the client sends none.
        """
        self._num_waiting += 1
        if self._slots.locked():
            self._shorten_timeouts()
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            return await self._read(messages)
        except StopAsyncIteration:
            raise InvalidArgument("the call has no message") from None
        except TimeoutError:
            raise Aborted(
                "the request's message did not arrive within the time limit",
                reason="MESSAGE_TOO_SLOW",
            ) from None
        finally:
            self._slots.release()

    async def _read(self, messages: AsyncIterator[bytes]) -> bytes:
        async with asyncio.timeout(self._timeout_seconds) as timeout:
            read = (asyncio.get_running_loop().time(), timeout)
            self._reads.append(read)
            if self._num_waiting:
                self._shorten_timeouts()
            try:
                return await anext(aiter(messages))
            finally:
                self._reads.remove(read)

    def _shorten_timeouts(self) -> None:
        for began, timeout in self._reads:
            when, latest = timeout.when(), began + self._pressed_seconds
            if not timeout.expired() and (when is None or when > latest):
                timeout.reschedule(latest)
