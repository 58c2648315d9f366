"""API keys and tenants in Redis, for gateways on several machines.

`apikeys:{all}:keys`      hash: a key's id to its record, in JSON
`apikeys:{all}:tenants`   hash: a tenant's name to its record, in JSON
`apikeys:{all}:version`   text that is replaced at each change, so that gateways notice changes

The braces put the Redis keys into one slot of Redis Cluster, so that one script can access them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
from services.common.redis.connection import CALL_SECONDS, RedisConnection, RedisUnavailable

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
for i = 2, #ARGV, 4 do
  if (redis.call('HGET', KEYS[ARGV[i] + 0], ARGV[i + 1]) or '') ~= ARGV[i + 2] then return 0 end
end
for i = 2, #ARGV, 4 do redis.call('HSET', KEYS[ARGV[i] + 0], ARGV[i + 1], ARGV[i + 3]) end
redis.call('SET', KEYS[3], ARGV[1])
return 1
"""
"""The arguments are the new version and, for each changed record, the number of its hash, its name,
its stored text, and its new text. Changes nothing if another process has changed a stored text.
"""
_MOST_TRIES = 100


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
    return _book(*await _read_texts(redis))


async def change_book(
    redis: RedisConnection, change: Callable[[KeyBook], KeyBook], draw_version: Callable[[], str]
) -> None:
    """Replaces the records that differ in the result of `change`, which removes none. If another
    process changes one of these records at the same time, `change` is called again with the new
    book. `draw_version` returns a text that was never used before. Raises RedisUnavailable or
    DamagedRecord.
    """
    for _ in range(_MOST_TRIES):
        keys, tenants = await _read_texts(redis)
        before = _book(keys, tenants)
        after = change(before)
        records = [
            *_changed("1", keys, before.keys, after.keys, key_to_json),
            *_changed("2", tenants, before.tenants, after.tenants, tenant_to_json),
        ]
        arguments = (draw_version(), *chain.from_iterable(records))
        if await redis.call(
            lambda client, arguments=arguments: client.eval(  # type: ignore[misc]
                _CHANGE, len(_NAMES), *_NAMES, *arguments
            )
        ):
            return
    complaint = "other processes change the same records"
    raise RedisUnavailable(f"Redis at {redis.name}: {complaint}", complaint)


def _changed(
    number: str,
    texts: Mapping[str, bytes],
    before: Mapping[str, R],
    after: Mapping[str, R],
    to_json: Callable[[R], dict[str, Any]],
) -> list[tuple[str, str, bytes, str]]:
    """For each changed record of a hash, the arguments of `_CHANGE`."""
    return [
        (number, name, texts.get(name, b""), json.dumps(to_json(record), sort_keys=True))
        for name, record in after.items()
        if before.get(name) != record
    ]


async def _read_texts(redis: RedisConnection) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The stored texts of all keys and all tenants."""
    keys, tenants = await redis.pipeline([("HGETALL", KEYS), ("HGETALL", TENANTS)])
    return _texts(keys), _texts(tenants)


def _book(keys: Mapping[str, bytes], tenants: Mapping[str, bytes]) -> KeyBook:
    return KeyBook(
        {name: _decoded(name, value, key_from_json) for name, value in keys.items()},
        {name: _decoded(name, value, tenant_from_json) for name, value in tenants.items()},
    )


def _decoded(name: str, value: bytes, read: Callable[[str, object], R]) -> R:
    try:
        return read(name, json.loads(value))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, DamagedRecord) else DamagedRecord(str(error)) from error


def _texts(pairs: Any) -> dict[str, bytes]:
    """Decodes the reply to HGETALL, which is a mapping or alternates names and values."""
    if not isinstance(pairs, dict):
        pairs = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return {name.decode(): value for name, value in pairs.items()}
