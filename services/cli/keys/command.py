"""`stepwell keys`: creates, lists and revokes API keys, in a file or in Redis."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.cli.errors import CommandError, CommandParser
from services.cli.keys.stores import FileStore, RedisStore, Store
from services.cli.keys.table import as_json, key_rows, show
from services.common.keys import api_keys
from services.common.keys.book import KeyBook

_SECONDS_PER_DAY = 86_400
_LIMITS = {
    "requests_per_minute": "requests per minute; 0 for no limit",
    "tokens_per_minute": "uncached prompt tokens and generated ones per minute; 0 for no limit",
    "max_concurrent_requests": "requests at once; 0 for no limit",
}


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    with _store(arguments) as store:
        run = {"create": _create, "list": _list, "revoke": _revoke}[arguments.action]
        run(store, arguments)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "keys",
        description="Makes, lists and revokes API keys.",
        epilog="STEPWELL_GATEWAY_API_KEY_FILE and STEPWELL_GATEWAY_REDIS_URL are the defaults of "
        "--file and --redis-url.",
    )
    parser.add_argument("action", choices=("create", "list", "revoke"))
    parser.add_argument("key", nargs="?", metavar="ID", help="id of the key to revoke")
    parser.add_argument("--file", type=Path, help="file of keys, as --api-key-file of the gateway")
    parser.add_argument("--redis-url", metavar="URL", help="Redis that holds the keys")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tenant", help="tenant for which to create a key")
    parser.add_argument(
        "--expires-in-days", type=float, metavar="X", help="(default: the key does not expire)"
    )
    parser.add_argument("--models", metavar="A,B", help="models that the key allows (default: all)")
    limits = parser.add_argument_group(
        "limits of the tenant",
        "The limits apply to all keys of the tenant; limits that are not given stay unchanged.",
    )
    for name, text in _LIMITS.items():
        limits.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    limits.add_argument(
        "--weight",
        type=float,
        metavar="X",
        help="weight of the tenant's share if tenants compete (default: 1)",
    )
    limits.add_argument(
        "--priority-ceiling",
        type=int,
        metavar="N",
        help="least priority value of the tenant's requests; smaller values run earlier",
    )
    limits.add_argument(
        "--max-retained-share",
        type=float,
        metavar="X",
        help="most blocks of its paused programs, as a share of a replica's blocks (default: 1)",
    )
    return parser


def _store(arguments: argparse.Namespace) -> Store:
    file, url = arguments.file, arguments.redis_url
    if file is None and url is None:
        file = os.environ.get("STEPWELL_GATEWAY_API_KEY_FILE")
        url = None if file else os.environ.get("STEPWELL_GATEWAY_REDIS_URL")
    if (file is None) == (url is None):
        raise CommandError("give either --file PATH or --redis-url URL", exit_status=2)
    return RedisStore(url) if file is None else FileStore(Path(file))


def _create(store: Store, arguments: argparse.Namespace) -> None:
    if arguments.key is not None:
        raise CommandError("create accepts no ID: it makes a new one", exit_status=2)
    if arguments.tenant is None or not api_keys.is_tenant_id(arguments.tenant):
        raise CommandError(
            "--tenant must be given: 1 to 64 letters, digits, and ._@-", exit_status=2
        )
    limits = _limits(arguments)
    key, key_id, sha256 = api_keys.new_key()
    now = int(time.time())
    record = api_keys.KeyRecord(
        key_id, sha256, arguments.tenant, now, _expiry(arguments, now), models=_models(arguments)
    )
    tenant = api_keys.TenantRecord(arguments.tenant)

    def add(book: KeyBook) -> KeyBook:
        nonlocal tenant
        tenant = replace(book.tenant_of(record), **limits)
        return book.with_key(record, tenant)

    store.change(add)
    if arguments.json:
        print(json.dumps({"key": key, **as_json(record, tenant, now)}))
        return
    print(key)
    print(
        f"id {key_id}, tenant {tenant.tenant_id}; it is not shown again: only its hash is kept",
        file=sys.stderr,
    )


def _limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """The limits that flags set, by the names of a tenant's fields."""
    given: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in (*_LIMITS, "weight", "priority_ceiling", "max_retained_share")
        if getattr(arguments, name) is not None
    }
    for name in _LIMITS:
        if given.get(name) == 0:
            given[name] = None
    tenant = api_keys.TenantRecord(arguments.tenant, **given)
    if (complaint := api_keys.why_wrong(tenant)) is not None:
        raise CommandError(f"--{complaint.replace('_', '-')}", exit_status=2)
    return given


def _expiry(arguments: argparse.Namespace, now: int) -> int | None:
    days: float | None = arguments.expires_in_days
    if days is None:
        return None
    if not 0 < days <= 36_500:
        raise CommandError(
            "--expires-in-days must be above 0, and a century at most", exit_status=2
        )
    return now + max(1, round(days * _SECONDS_PER_DAY))


def _models(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    if arguments.models is None:
        return None
    names = tuple(name.strip() for name in arguments.models.split(",") if name.strip())
    if not names:
        raise CommandError("--models must name at least one", exit_status=2)
    return names


def _list(store: Store, arguments: argparse.Namespace) -> None:
    book, now = store.read(), time.time()
    keys = sorted(book.keys.values(), key=lambda key: (key.tenant_id, key.created, key.key_id))
    if arguments.json:
        print(json.dumps([as_json(key, book.tenant_of(key), now) for key in keys], indent=2))
    elif keys:
        show(key_rows(book, keys, now))
    else:
        print("there are no keys", file=sys.stderr)


def _revoke(store: Store, arguments: argparse.Namespace) -> None:
    if arguments.key is None:
        raise CommandError(
            "revoke needs the id of a key; `stepwell keys list` shows the ids", exit_status=2
        )
    key_id = api_keys.key_id_of(arguments.key) or arguments.key
    record = store.read().keys.get(key_id)
    if record is None:
        raise CommandError(f"there is no key with the id {key_id[:40]!r}")
    now = int(time.time())
    if record.revoked is None:
        record = replace(record, revoked=now)
        store.change(lambda book: book.with_key(record))
    if arguments.json:
        print(json.dumps(as_json(record, store.read().tenant_of(record), now)))
    else:
        print(f"{key_id} of {record.tenant_id} is revoked", file=sys.stderr)
