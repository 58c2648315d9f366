"""Two tenants' keys and prefix caches are separate, with all services."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.keys.api_keys import TenantRecord
from services.common.keys.book_file import change_book
from tests.e2e.conftest import TinyModel
from tests.e2e.stack import Stack
from tests.gateway.keyring import bearer, make_key
from tests.plain_http import http_client

PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A key file and its keys: two of one tenant, and one of another."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made = []
    for name in ("acme", "acme", "other"):
        tenant = TenantRecord(name)
        key, record = make_key(tenant)
        change_book(path, lambda book, r=record, t=tenant: book.with_key(r, t))  # type: ignore[misc]
        made.append(key)
    return path, made


@pytest.fixture(scope="module")
def stack(tiny_model: TinyModel, keys: tuple[Path, list[str]]) -> Iterator[Stack]:
    """`stepwell up` with the key file. Its output needs no key to become `ready`."""
    running = Stack(tiny_model.directory, "--num-blocks", "100", "--api-key-file", str(keys[0]))
    yield running
    running.close()


def test_a_prompt_of_another_tenant_is_not_found_in_the_cache(
    stack: Stack, keys: tuple[Path, list[str]]
) -> None:
    first, second, other = keys[1]
    asked = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    with http_client(base_url=stack.url, trust_env=False) as http:
        assert http.post("/v1/completions", json=asked).status_code == 401

        def num_cached(key: str) -> int:
            answer = http.post("/v1/completions", json=asked, headers=bearer(key)).json()
            count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return count

        assert num_cached(first) == 0
        assert num_cached(other) == 0
        assert num_cached(second) == 96, "six blocks of 16, of the tenant's other key"
        assert num_cached(other) == 96, "by now its own"
