"""API keys and tenants in Redis, for gateways on several machines.

`apikeys:{all}:keys`      hash: a key's id to its record, in JSON
`apikeys:{all}:tenants`   hash: a tenant's name to its record, in JSON
`apikeys:{all}:version`   text that is replaced at each change, so that gateways notice changes

The braces put the Redis keys into one slot of Redis Cluster, so that one script can access them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from services.common.keys.api_keys import (
    DamagedRecord,
    KeyRecord,
    TenantRecord,
    key_from_json,
    key_to_json,
    tenant_from_json,
    tenant_to_json,
)
from services.common.keys.book import KeyBook
from services.common.redis.connection import CALL_SECONDS, RedisConnection

KEYS, TENANTS, VERSION = (f"apikeys:{{all}}:{name}" for name in ("keys", "tenants", "version"))
R = TypeVar("R")

_NAMES = (KEYS, TENANTS, VERSION)

_LOOK_UP = """
local found = {redis.call('GET', KEYS[3]) or ''}
for _, id in ipairs(ARGV) do
  local key, tenant = redis.call('HGET', KEYS[1], id), false
  local is_json, record = pcall(cjson.decode, key or '')
  if is_json and type(record) == 'table' and type(record.tenant) == 'string' then
    tenant = redis.call('HGET', KEYS[2], record.tenant)
  end
  found[#found + 1] = key or ''
  found[#found + 1] = tenant or ''
end
return found
"""

_CHANGE = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[2], ARGV[4], ARGV[5]) end
redis.call('SET', KEYS[3], ARGV[6])
return 1
"""


class ChangedMeanwhile(Exception):
    """The stored record differs from the record on which the change is based."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """The result of a look-up. `found` maps key ids to the records of the key and its tenant.
    `version` is the store's current version text, or empty if nothing has ever been written.
    `damaged` counts the invalid records, which `found` excludes.
    """

    version: str
    found: dict[str, tuple[KeyRecord, TenantRecord]]
    damaged: int


async def look_up(
    redis: RedisConnection, key_ids: Sequence[str], seconds: float = CALL_SECONDS
) -> LookUp:
    """Looks up the records of several keys with one Redis call. Raises RedisUnavailable."""
    version, *values = await redis.call(
        lambda client: client.eval(_LOOK_UP, len(_NAMES), *_NAMES, *key_ids), seconds
    )
    found, damaged = {}, 0
    for key_id, key_value, tenant_value in zip(key_ids, values[::2], values[1::2], strict=True):
        if not key_value:
            continue
        try:
            key = _decoded(key_id, key_value, key_from_json)
            tenant = TenantRecord(key.tenant_id)
            if tenant_value:
                tenant = _decoded(key.tenant_id, tenant_value, tenant_from_json)
        except DamagedRecord:
            damaged += 1
        else:
            found[key_id] = key, tenant
    return LookUp(version.decode(), found, damaged)


async def read_book(redis: RedisConnection) -> KeyBook:
    """Reads all records. Raises RedisUnavailable or DamagedRecord."""
    keys, tenants = await redis.pipeline([("HGETALL", KEYS), ("HGETALL", TENANTS)])
    return KeyBook(
        {name: _decoded(name, value, key_from_json) for name, value in _texts(keys)},
        {name: _decoded(name, value, tenant_from_json) for name, value in _texts(tenants)},
    )


async def change_key(
    redis: RedisConnection,
    before: KeyRecord | None,
    after: KeyRecord,
    tenant: TenantRecord | None,
    version: str,
) -> None:
    """Replaces a key's record, and its tenant's record if given. `before` is None for a new key.
    `version` must be a text that was never used before. Raises RedisUnavailable, or
    ChangedMeanwhile if the stored record is not `before`.
    """
    arguments = (
        after.key_id,
        "" if before is None else _encoded(key_to_json(before)),
        _encoded(key_to_json(after)),
        "" if tenant is None else tenant.tenant_id,
        "" if tenant is None else _encoded(tenant_to_json(tenant)),
        version,
    )
    done = await redis.call(lambda client: client.eval(_CHANGE, len(_NAMES), *_NAMES, *arguments))
    if not done:
        raise ChangedMeanwhile(after.key_id)


def _encoded(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _decoded(name: str, value: bytes, read: Callable[[str, object], R]) -> R:
    try:
        return read(name, json.loads(value))
    except ValueError as error:
        raise error if isinstance(error, DamagedRecord) else DamagedRecord(str(error)) from error


def _texts(pairs: Any) -> list[tuple[str, bytes]]:
    """Decodes the reply to HGETALL, which is a mapping or alternates names and values."""
    if not isinstance(pairs, dict):
        pairs = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return [(name.decode(), value) for name, value in pairs.items()]
