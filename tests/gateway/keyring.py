"""API keys in a file or in Redis, as `stepwell keys` creates them, and a gateway with one key."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from services.common.keys.api_keys import KeyRecord, TenantRecord, key_id_of, new_key
from services.common.keys.book_file import change_book, read_book
from services.common.keys.book_redis import change_book as change_redis_book
from services.common.keys.book_redis import read_book as read_redis_book
from services.common.redis.connection import RedisConnection
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving

BODY = {"prompt": [5, 6, 7], "max_tokens": 2}


class Keyring(Protocol):
    async def add(self, tenant: TenantRecord, **fields: Any) -> str: ...

    async def revoke(self, key: str) -> None: ...


class FileKeyring:
    def __init__(self, path: Path) -> None:
        self.path = path

    async def add(self, tenant: TenantRecord, **fields: Any) -> str:
        key, record = make_key(tenant, **fields)
        change_book(self.path, lambda book: book.with_key(record, tenant))
        return key

    async def revoke(self, key: str) -> None:
        record = read_book(self.path).keys[str(key_id_of(key))]
        revoked = replace(record, revoked=int(time.time()))
        change_book(self.path, lambda book: book.with_key(revoked))


class RedisKeyring:
    def __init__(self, url: str) -> None:
        self.redis = RedisConnection(url)
        self._num_changes = 0

    async def add(self, tenant: TenantRecord, **fields: Any) -> str:
        key, record = make_key(tenant, **fields)
        await change_redis_book(
            self.redis, lambda book: book.with_key(record, tenant), self._version
        )
        return key

    async def revoke(self, key: str) -> None:
        record = (await read_redis_book(self.redis)).keys[str(key_id_of(key))]
        revoked = replace(record, revoked=int(time.time()))
        await change_redis_book(self.redis, lambda book: book.with_key(revoked), self._version)

    def _version(self) -> str:
        self._num_changes += 1
        return f"{id(self)}-{self._num_changes}"


def make_key(tenant: TenantRecord, **fields: Any) -> tuple[str, KeyRecord]:
    """A new key and its record. `fields` are fields of the record."""
    key, key_id, sha256 = new_key()
    record = KeyRecord(key_id, sha256, tenant.tenant_id, int(time.time()))
    return key, replace(record, **fields)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def limited(
    model: Path, tmp_path: Path, scheduler: FakeScheduler | None = None, **limits: Any
) -> AsyncIterator[tuple[Serving, str]]:
    """Runs a gateway with one API key, of the tenant acme. `limits` are fields of the tenant's
    record. Yields the gateway and the key.
    """
    ring = FileKeyring(tmp_path / "keys.json")
    key = await ring.add(TenantRecord("acme", **limits))
    async with serving(model, scheduler or FakeScheduler(), api_key_file=ring.path) as served:
        yield served, key


async def post(served: Serving, key: str, **fields: Any) -> httpx.Response:
    return await served.http.post("/v1/completions", json=BODY | fields, headers=bearer(key))
