"""Implements the Journal, through which gateways share answers, in Redis. SCOPE identifies the
answer to a client's idempotency key. Each answer has two Redis keys:

    `idem:{SCOPE}:log`      stream: the log; an entry's id is FENCE-NUMBER, its only field is `b`
    `idem:{SCOPE}:lease`    string: name of the gateway that generates the answer

A fence is the number of a log's owner. A stream rejects an id that is not above its last id, so a
former owner, whose fence is lower, cannot append. Both Redis keys expire. They are in the same hash
slot of a Redis Cluster.
"""

from collections.abc import Sequence
from typing import Any

from services.common.redis.connection import FIRST_CALL_SECONDS, RedisConnection, RedisUnavailable
from services.gateway.options.idempotency.core.journal import Append, Appended, News, Position

CALL_SECONDS = 0.25
"""The time limit of a call to Redis. Requests with a key wait for such calls."""
_FIELD = b"b"
_NOT_ABOVE = "equal or smaller"


class RedisJournal:
    """Stores logs as streams. Each call takes one round trip to each node of Redis."""

    def __init__(
        self,
        redis: RedisConnection,
        gateway: str,
        *,
        lease_seconds: float,
        retention_seconds: float,
    ) -> None:
        """`gateway` is this gateway's name, which is the value of its leases, so that operators can
        see who has a lease.
        """
        self._redis = redis
        self._gateway = gateway
        self._lease_millis = int(1000 * lease_seconds)
        self._retention_millis = int(1000 * retention_seconds)

    async def ping(self) -> None:
        await self._redis.call(lambda client: client.ping(), FIRST_CALL_SECONDS)

    async def close(self) -> None:
        await self._redis.close()

    async def open(self, scope: str) -> tuple[bool, News]:
        lease = ("SET", _lease(scope), self._gateway, "NX", "PX", self._lease_millis)
        took, entries = await self._execute([lease, ("XRANGE", _log(scope), "-", "+")])
        return took is not None, News(_entries(entries), is_leased=True)

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        answers = await self._execute(
            [
                command
                for append in appends
                for command in (
                    self._xadd(append),
                    ("PEXPIRE", _log(append.scope), self._retention_millis),
                    self._lease_command(append),
                )
            ]
        )
        return [
            await self._outcome(append, answer)
            for append, answer in zip(appends, answers[::3], strict=True)
        ]

    def _xadd(self, append: Append) -> tuple[Any, ...]:
        options = () if append.begins else ("NOMKSTREAM",)
        entry = (_id(append.position), _FIELD, append.value)
        return ("XADD", _log(append.scope), *options, *entry)

    def _lease_command(self, append: Append) -> tuple[Any, ...]:
        if append.keeps_lease:
            return ("SET", _lease(append.scope), self._gateway, "PX", self._lease_millis)
        return ("DEL", _lease(append.scope))

    async def _outcome(self, append: Append, answer: Any) -> Appended:
        if answer is None:
            return Appended.LOST
        if not isinstance(answer, Exception) or await self._is_last(append):
            return Appended.DONE
        return Appended.FENCED

    async def _is_last(self, append: Append) -> bool:
        """Whether the log ends with exactly this entry. If so, an earlier call has appended the
        entry, although that call seemed to fail.
        """
        [found] = await self._execute([("XREVRANGE", _log(append.scope), "+", "-", "COUNT", 1)])
        return _entries(found) == [(append.position, append.value)]

    async def read(self, places: Sequence[tuple[str, Position]]) -> list[News]:
        commands: list[tuple[Any, ...]] = []
        for scope, position in places:
            commands.append(("XRANGE", _log(scope), f"({_id(position)}", "+"))
            commands.append(("EXISTS", _lease(scope)))
        answers = await self._execute(commands)
        return [
            News(_entries(entries), is_leased=bool(exists))
            for entries, exists in zip(answers[::2], answers[1::2], strict=True)
        ]

    async def release(self, scope: str) -> None:
        await self._execute([("DEL", _lease(scope))])

    async def forget(self, scopes: Sequence[str]) -> None:
        await self._execute([("DEL", _log(scope), _lease(scope)) for scope in scopes])

    async def _execute(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns Redis' answers to the commands in order, with an exception as the answer to an
        XADD whose id is too low. Raises RedisUnavailable for any other error.
        """
        if not commands:
            return []
        answers = await self._redis.pipeline(commands, CALL_SECONDS, raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and _NOT_ABOVE not in str(answer):
                raise RedisUnavailable(f"Redis at {self._redis.name}: {answer}") from answer
        return answers


def _log(scope: str) -> str:
    return f"idem:{{{scope}}}:log"


def _lease(scope: str) -> str:
    return f"idem:{{{scope}}}:lease"


def _id(position: Position) -> str:
    return f"{position.fence}-{position.number}"


def _entries(
    found: Sequence[tuple[bytes, dict[bytes, bytes] | None]],
) -> list[tuple[Position, bytes]]:
    """Returns entries with their positions. An entry without the field `b` has an empty value,
    which counts as damaged.
    """
    entries = []
    for entry_id, fields in found or ():
        fence, _, number = entry_id.partition(b"-")
        entries.append((Position(int(fence), int(number)), (fields or {}).get(_FIELD, b"")))
    return entries
