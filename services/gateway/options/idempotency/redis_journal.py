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
_APPEND = """-- appends to a log as its owner
local id, value, begins = ARGV[1], ARGV[2], ARGV[3] == '1'
local retention, lease, gateway = ARGV[4], ARGV[5], ARGV[6]
if not begins and redis.call('EXISTS', KEYS[1]) == 0 then return 'lost' end
local added = redis.pcall('XADD', KEYS[1], id, 'b', value)
if type(added) == 'table' then
  if not string.find(added.err, 'equal or smaller') then return added end
  local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
  if not last or last[1] ~= id or last[2][2] ~= value then return 'fenced' end
end
redis.call('PEXPIRE', KEYS[1], retention)
if lease == '0' then
  redis.call('DEL', KEYS[2])
else
  redis.call('SET', KEYS[2], gateway, 'PX', lease)
end
return 'done'
"""
"""Appends an entry, then renews the lease, or releases it if the duration is 0. Returns the value
of an Appended. If the log's last entry is exactly this entry, an earlier call has appended it,
although that call seemed to fail. A former owner changes neither the log nor the lease, which the
new owner has.
"""


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
        answers = await self._execute([self._append_command(append) for append in appends])
        return [Appended(answer.decode()) for answer in answers]

    def _append_command(self, append: Append) -> tuple[Any, ...]:
        keys = (_log(append.scope), _lease(append.scope))
        entry = (_id(append.position), append.value, int(append.begins))
        lease = (self._lease_millis if append.keeps_lease else 0, self._gateway)
        return ("EVAL", _APPEND, len(keys), *keys, *entry, self._retention_millis, *lease)

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
        """Returns Redis' answers to the commands in order. Raises RedisUnavailable for an error."""
        if not commands:
            return []
        answers = await self._redis.pipeline(commands, CALL_SECONDS, raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
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
