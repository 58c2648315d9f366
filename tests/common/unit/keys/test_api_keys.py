"""API keys, their records, and the key file."""

import hashlib
import json
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.keys.api_keys import (
    MAX_LIMIT,
    DamagedRecord,
    KeyRecord,
    KeyState,
    TenantRecord,
    key_from_json,
    key_id_of,
    key_to_json,
    new_key,
    tenant_from_json,
    tenant_to_json,
)
from services.common.keys.book import KeyBook, book_from_text, book_to_text
from services.common.keys.book_file import change_book, read_book, version_of

KEY = KeyRecord("abcdef234567", "0" * 64, "acme", 1_700_000_000)
TENANT_IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True)
LIMITS = st.none() | st.integers(1, MAX_LIMIT)
TIMES = st.integers(0, 4_000_000_000)
RECORDS = st.builds(
    KeyRecord,
    st.from_regex(r"[a-z0-9]{12}", fullmatch=True),
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    TENANT_IDS,
    TIMES,
    st.none() | TIMES,
    st.none() | TIMES,
    st.none() | st.lists(st.text(min_size=1)).map(tuple),
)
TENANTS = st.builds(
    TenantRecord,
    TENANT_IDS,
    st.floats(0.001, 1000),
    LIMITS,
    LIMITS,
    LIMITS,
    st.none() | st.integers(-(2**31) + 1, 2**31 - 1),
)


def test_a_key_is_an_id_and_32_random_bytes_of_which_a_hash_is_kept() -> None:
    key, key_id, sha256 = new_key(bytes)
    assert key == "sk-aaaaaaaaaaaa-" + 43 * "A"
    assert key_id_of(key) == key_id
    assert sha256 == hashlib.sha256(key.encode()).hexdigest()
    record = replace(KEY, sha256=sha256)
    assert record.matches(key.encode())
    assert not record.matches(key[:-1].encode() + b"B")


def test_new_keys_and_their_ids_differ() -> None:
    keys = {new_key()[0] for _ in range(100)}
    assert len({key_id_of(key) for key in keys}) == 100


@pytest.mark.parametrize("text", ["", "sk-", "sk-abc-def", "sk-aaaaaaaaaaaa-short", "x" * 59])
def test_what_has_not_the_form_of_a_key_has_no_id(text: str) -> None:
    assert key_id_of(text) is None


def test_a_key_is_active_until_it_expires_or_is_revoked() -> None:
    limited = replace(KEY, expires=1_800_000_000)
    assert KEY.state(4e9) is KeyState.ACTIVE
    assert limited.state(1_799_999_999.9) is KeyState.ACTIVE
    assert limited.state(1_800_000_000.0) is KeyState.EXPIRED
    assert replace(limited, revoked=1).state(1_800_000_000.0) is KeyState.REVOKED


@given(RECORDS)
def test_a_record_survives_json(record: KeyRecord) -> None:
    value = json.loads(json.dumps(key_to_json(record)))
    assert key_from_json(record.key_id, value) == record


@given(TENANTS)
def test_a_tenant_survives_json(tenant: TenantRecord) -> None:
    value = json.loads(json.dumps(tenant_to_json(tenant)))
    assert tenant_from_json(tenant.tenant_id, value) == tenant


def damaged_keys() -> list[object]:
    """Invalid records of keys, each invalid for another reason."""
    whole = key_to_json(KEY)
    changes: list[dict[str, object]] = [
        {"sha256": "0" * 63},
        {"sha256": "Z" * 64},
        {"tenant": ""},
        {"tenant": "a b"},
        {"created": None},
        {"created": 5},
        {"expires": "2026-01-01T00:00:00"},
        {"revoked": "soon"},
        {"models": "a"},
        {"models": [""]},
        {"limit": 3},
    ]
    return [[], None, {}, *({**whole, **change} for change in changes)]


@pytest.mark.parametrize("value", damaged_keys(), ids=str)
def test_a_damaged_record_is_named_by_its_key(value: object) -> None:
    with pytest.raises(DamagedRecord, match="key 'abcdef234567'"):
        key_from_json("abcdef234567", value)


@pytest.mark.parametrize(
    "value",
    [
        {"weight": 0},
        {"max_retained_share": 0},
        {"max_retained_share": 1.5},
        {"max_retained_share": "1"},
        {"max_retained_share": float("nan")},
        {"weight": "1"},
        {"weight": float("nan")},
        {"weight": 10**400},
        {"requests_per_minute": 0},
        {"tokens_per_minute": 1.5},
        {"max_concurrent_requests": True},
        {"priority_ceiling": 2**31},
        {"tenant_id": "b"},
    ],
    ids=str,
)
def test_damage_of_a_tenant_is_named(value: object) -> None:
    with pytest.raises(DamagedRecord, match="tenant 'acme'"):
        tenant_from_json("acme", value)


@given(st.lists(RECORDS, max_size=3), st.lists(TENANTS, max_size=3))
def test_a_book_survives_its_file(keys: list[KeyRecord], tenants: list[TenantRecord]) -> None:
    book = KeyBook({k.key_id: k for k in keys}, {t.tenant_id: t for t in tenants})
    assert book_from_text(book_to_text(book)) == book


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"keys": []}', '{"key": {}}', '{"keys": {"x": {}}}', "[" * 100_000]
)
def test_a_damaged_book_is_refused_as_a_whole(text: str) -> None:
    with pytest.raises(DamagedRecord):
        book_from_text(text)


def test_a_file_is_its_owners_alone_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    change_book(path, lambda book: book.with_key(KEY, TenantRecord("acme", 2.0)))
    first = version_of(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_book(path).tenant_of(KEY).weight == 2.0
    change_book(path, lambda book: book.with_key(replace(KEY, revoked=5)))
    assert version_of(path) != first
    assert read_book(path).keys == {KEY.key_id: replace(KEY, revoked=5)}
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def test_a_change_keeps_who_may_read_the_file_and_where_it_is(tmp_path: Path) -> None:
    path, link = tmp_path / "stored.json", tmp_path / "keys.json"
    change_book(path, lambda book: book)
    link.symlink_to(path)
    path.chmod(0o640)
    owner = (10_001, 10_001) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(path, *owner)
    change_book(link, lambda book: book.with_key(KEY))
    found = path.stat()
    assert read_book(path).keys == {KEY.key_id: KEY}
    assert stat.S_IMODE(found.st_mode) == 0o640
    assert (found.st_uid, found.st_gid) == owner
    assert link.is_symlink()


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    change_book(path, lambda book: book.with_key(KEY))
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        change_book(path, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def _add_keys(path: Path, letter: str) -> None:
    for number in range(20):
        key = replace(KEY, key_id=f"{letter}{number:011d}")
        change_book(path, lambda book, key=key: book.with_key(key))  # type: ignore[misc]


def test_changes_of_several_processes_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_add_keys, args=(path, letter)) for letter in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert len(read_book(path).keys) == 60
