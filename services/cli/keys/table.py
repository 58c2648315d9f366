"""Formats the records of keys for the output of `stepwell keys`."""

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.common.keys.api_keys import (
    KeyRecord,
    KeyState,
    TenantRecord,
    key_to_json,
    tenant_to_json,
    time_text,
)
from services.common.keys.book import KeyBook

COLUMNS = (
    "id", "tenant", "state", "created", "expires", "models", "requests/min", "tokens/min",
    "at once", "weight", "priority", "retained",
)  # fmt: skip
_STYLES = {KeyState.ACTIVE: "green", KeyState.EXPIRED: "yellow", KeyState.REVOKED: "red"}
_PIPE_WIDTH = 250


def as_json(key: KeyRecord, tenant: TenantRecord, now: float) -> dict[str, Any]:
    """A key's record as JSON values, with the tenant's limits and without the key's hash."""
    values = {name: value for name, value in key_to_json(key).items() if name != "sha256"}
    return {
        "id": key.key_id,
        "state": key.state(now).value,
        **values,
        "limits": tenant_to_json(tenant),
    }


def key_rows(book: KeyBook, keys: Sequence[KeyRecord], now: float) -> list[list[str]]:
    """One row of texts for each key. Its columns are COLUMNS."""
    return [_row(key, book.tenant_of(key), now) for key in keys]


def _row(key: KeyRecord, tenant: TenantRecord, now: float) -> list[str]:
    state = key.state(now)
    return [
        key.key_id,
        escape(tenant.tenant_id),
        f"[{_STYLES[state]}]{state.value}[/]",
        time_text(key.created),
        "never" if key.expires is None else time_text(key.expires),
        "all" if key.models is None else escape(", ".join(key.models)),
        _limit(tenant.requests_per_minute),
        _limit(tenant.tokens_per_minute),
        _limit(tenant.max_concurrent_requests),
        f"{tenant.weight:g}",
        "any" if tenant.priority_ceiling is None else f"from {tenant.priority_ceiling}",
        f"{tenant.max_retained_share:g}",
    ]


def _limit(limit: int | None) -> str:
    return "-" if limit is None else f"{limit:,}"


def show(rows: Sequence[Sequence[str]]) -> None:
    """Prints a table. If standard output is a pipe, each row is one line."""
    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, no_wrap=name in ("id", "state", "created", "expires"))
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(width=width).print(table)
