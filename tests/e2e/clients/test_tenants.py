"""Two tenants' keys, prefix caches and agents' programs are separate, with all services."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.common.keys.api_keys import TenantRecord
from services.common.keys.book_file import change_book
from tests.e2e.simulated_agents import simulated_stack, turn
from tests.e2e.stack import Stack
from tests.gateway.keyring import bearer, make_key
from tests.plain_http import http_client

PROMPT = list(range(5, 105))
JOB = {"job_id": "job", "this_func_call": "sed"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """A key file, and the headers with its keys: two of one tenant, and one of another."""
    path, headers = tmp_path_factory.mktemp("keys") / "keys.json", []
    for name in ("acme", "acme", "other"):
        tenant = TenantRecord(name)
        key, record = make_key(tenant)
        change_book(path, lambda book, r=record, t=tenant: book.with_key(r, t))  # type: ignore[misc]
        headers.append(bearer(key))
    return path, headers


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, list[dict[str, str]]]
) -> Iterator[Stack]:
    """`stepwell up` with the key file. Its output needs no key to become `ready`."""
    directory: Path = tmp_path_factory.mktemp("tenants")
    with closing(simulated_stack(directory, "--api-key-file", str(keys[0]))) as running:
        yield running


def test_a_prompt_of_another_tenant_is_not_found_in_the_cache(
    stack: Stack, keys: tuple[Path, list[dict[str, str]]]
) -> None:
    first, second, other = keys[1]
    asked = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    with http_client(base_url=stack.url, trust_env=False) as http:
        assert http.post("/v1/completions", json=asked).status_code == 401

        def num_cached(key: dict[str, str]) -> int:
            answer = http.post("/v1/completions", json=asked, headers=key).json()
            count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return count

        assert num_cached(first) == 0
        assert num_cached(other) == 0
        assert num_cached(second) == 96, "six blocks of 16, of the tenant's other key"
        assert num_cached(other) == 96, "by now its own"


def test_names_of_another_tenants_programs_reach_nothing(
    stack: Stack, keys: tuple[Path, list[dict[str, str]]]
) -> None:
    """The second tenant sends the same tokens under the same name, and ends its own program."""
    acme, _, other = keys[1]
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
