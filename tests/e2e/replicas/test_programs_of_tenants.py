"""Names of another tenant's programs (agents' requests) give no access to their cached blocks."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.common.keys.api_keys import TenantRecord
from services.common.keys.book_file import change_book
from tests.e2e.simulated_agents import simulated_stack, turn
from tests.e2e.stack import Stack
from tests.gateway.keyring import bearer, make_key

JOB = {"job_id": "job", "this_func_call": "sed"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """A key file, and the headers of two tenants."""
    path, headers = tmp_path_factory.mktemp("keys") / "keys.json", []
    for name in ("acme", "other"):
        tenant = TenantRecord(name)
        key, record = make_key(tenant)
        change_book(path, lambda book, r=record, t=tenant: book.with_key(r, t))  # type: ignore[misc]
        headers.append(bearer(key))
    return path, headers


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, list[dict[str, str]]]
) -> Iterator[Stack]:
    directory: Path = tmp_path_factory.mktemp("tenants")
    with closing(simulated_stack(directory, "--api-key-file", str(keys[0]))) as running:
        yield running


def test_names_of_another_tenant_reach_nothing(
    stack: Stack, keys: tuple[Path, list[dict[str, str]]]
) -> None:
    """The second tenant sends the same tokens under the same name, and ends its own program."""
    acme, other = keys[1]
    context, num_cached = turn(stack.url, [*range(20, 81)], acme, **JOB)
    assert num_cached == 0
    theirs, num_cached = turn(stack.url, [*context, 7], other, **JOB)
    assert num_cached == 0, "no prefix of another tenant is read"
    _, num_cached = turn(stack.url, [*theirs, 8], other, **JOB, is_last_step=True)
    assert num_cached >= 64, "its own"
    child = other | {"X-Dynamo-Parent-Session-ID": "job"}
    turn(stack.url, [*range(50, 80)], child, job_id="child")
    context, num_cached = turn(stack.url, [*context, 7], acme, **JOB)
    assert num_cached >= 64, "the context of a program that has not ended"
    turn(stack.url, [*context, 8], acme, **JOB, is_last_step=True)
