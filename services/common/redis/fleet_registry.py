"""The registry of a fleet in Redis: the addresses of the schedulers that currently serve a model.

`fleet:{NAME}:replicas`   sorted set: the record of each replica, in JSON. The score is the end of
                          the replica's lease, in milliseconds of Redis's clock

NAME is the model name that clients use, quoted as in URLs. The braces keep all Redis keys of a
fleet in one slot of Redis Cluster. A scheduler renews its lease every second. Records with an
expired lease are not returned, and the next renewal by any scheduler removes them. Leases are timed
by Redis's clock, so the clocks of schedulers and gateways do not matter.
"""

import json
import logging
from dataclasses import dataclass
from urllib.parse import quote

from services.common.redis.connection import CALL_SECONDS, RedisConnection
from services.common.rpc.addresses import is_connect_address

logger = logging.getLogger(__name__)

RENEW_SECONDS = 1.0
LEASE_SECONDS = 3.0

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_RENEW = f"""{_NOW}
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_READ = f"""{_NOW}
return redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf')
"""


@dataclass(frozen=True, slots=True)
class RegisteredReplica:
    """The record of a scheduler process in the registry."""

    address: str
    """The address for gateways: host:port or unix:PATH."""
    node: str
    """The unique name of the scheduler's pool in the directory of cached prefixes."""


class FleetRegistry:
    """The replicas that serve a model under one name. Each method may raise RedisUnavailable."""

    def __init__(
        self, redis: RedisConnection, model_name: str, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self._redis = redis
        self._key = f"fleet:{{{quote(model_name)}}}:replicas"
        self._lease_millis = int(1000 * lease_seconds)
        self._damaged: set[bytes] = set()

    async def renew(self, replica: RegisteredReplica) -> None:
        """Registers a replica for the duration of one lease."""
        record = record_to_bytes(replica)
        await self._redis.call(
            lambda client: client.eval(_RENEW, 1, self._key, record, self._lease_millis)
        )

    async def remove(self, replica: RegisteredReplica, seconds: float = CALL_SECONDS) -> None:
        """Removes a replica. Does nothing if the replica is not registered."""
        record = record_to_bytes(replica)
        await self._redis.call(lambda client: client.zrem(self._key, record), seconds)

    async def replicas(self) -> list[RegisteredReplica]:
        """Returns the replicas with a valid lease. Logs each invalid record once."""
        records = await self._redis.call(lambda client: client.eval(_READ, 1, self._key))
        found = []
        for record in records:
            try:
                found.append(record_from_bytes(record))
            except ValueError as error:
                if record not in self._damaged:
                    self._damaged.add(record)
                    logger.warning(
                        "a damaged record of the schedulers' registry in Redis is ignored: %s",
                        error,
                    )
        return found


def record_to_bytes(replica: RegisteredReplica) -> bytes:
    """Encodes a record. Equal records have equal bytes."""
    values = {"address": replica.address, "node": replica.node}
    return json.dumps(values, separators=(",", ":")).encode()


def record_from_bytes(value: bytes) -> RegisteredReplica:
    """The inverse of `record_to_bytes`. Unknown fields are ignored. Raises ValueError."""
    try:
        values = json.loads(value)
        replica = RegisteredReplica(str(values["address"]), str(values["node"]))
        complaint = is_connect_address(replica.address)
    except (ValueError, KeyError, TypeError) as error:
        complaint = repr(error)
    if complaint is not None:
        raise ValueError(f"{value[:80]!r} is not the record of a scheduler: {complaint}")
    return replica
