"""A stack with all that dashboards show: TLS, Redis, and tenants that send requests."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from services.common.keys.api_keys import TenantRecord
from services.common.keys.book_file import change_book
from tests.certificates import LOOPBACK, ONE_DAY, Authority, Files
from tests.e2e.stack import Stack
from tests.gateway.keyring import bearer, make_key
from tests.plain_http import http_client
from tests.redis_servers import free_port, redis_server

TENANTS = ("ann", "bob", "flood")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
_TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
_PAUSE_SECONDS = 0.2


def make_keys(path: Path) -> dict[str, str]:
    """Writes a key file. Returns a key of each tenant."""
    keys = {}
    for name in TENANTS:
        tenant = TenantRecord(name)
        keys[name], record = make_key(tenant)
        change_book(path, lambda book, r=record, t=tenant: book.with_key(r, t))  # type: ignore[misc]
    return keys


@dataclass(frozen=True)
class Observed:
    """The stack with TLS, Redis and tenants. Its gateway expects one replica. Four sequences run at
    once, and one of the longest fills the KV cache of four blocks. A tenant's queue has at most
    two sequences.
    """

    stack: Stack
    keys: dict[str, str]
    metrics_url: str
    served: Files
    authority: Authority

    def certify(self, days: float) -> None:
        """Replaces the gateway's certificate."""
        self.served.write(self.authority.issue(*LOOPBACK, seconds=days * ONE_DAY), self.authority)

    def flood(self) -> AbstractContextManager[None]:
        """A load of which most requests exceed the queue of their tenant."""
        return self.load("flood", 12, max_tokens=200, ignore_eos=True)

    @contextmanager
    def load(self, tenant: str, clients: int, **changes: object) -> Iterator[None]:
        """Runs clients of a tenant inside the context. Each sends requests one after another."""
        body = {"prompt": "one two three four", "max_tokens": 8, "seed": 1} | changes
        headers = bearer(self.keys[tenant]) | _TRACEPARENT
        with sending(self.stack, clients, body, headers):
            yield


@contextmanager
def sending(
    stack: Stack, clients: int, body: dict[str, object], headers: dict[str, str]
) -> Iterator[None]:
    over = threading.Event()

    def send() -> None:
        with http_client(headers=headers) as http:
            while not over.wait(_PAUSE_SECONDS):
                try:
                    http.post(f"{stack.url}/v1/completions", json={"model": stack.model} | body)
                except httpx.TransportError:
                    continue

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(send) for _ in range(clients)]
        try:
            yield
        finally:
            over.set()
        for one in running:
            one.result()


@contextmanager
def observed(model: Path, directory: Path) -> Iterator[Observed]:
    authority, address = Authority(), f"127.0.0.1:{free_port()}"
    issued = authority.issue(*LOOPBACK, seconds=20 * ONE_DAY)
    served = Files(directory / "tls").write(issued, authority)
    keys = make_keys(directory / "keys.json")
    with redis_server(directory / "redis") as redis:
        stack = Stack(
            model,
            *("--block-size", "64", "--num-blocks", "5", "--max-model-len", "256"),
            *("--max-num-seqs", "4", "--liveness-timeout-seconds", "600"),
            *("--served-model-name", "second", "--redis-url", redis.url),
            *("--api-key-file", str(directory / "keys.json")),
            *("--tls-cert-file", str(served.cert), "--tls-key-file", str(served.key)),
            environ={
                "STEPWELL_GATEWAY_METRICS_ADDRESS": address,
                "STEPWELL_GATEWAY_EXPECTED_REPLICAS": "1",
                "STEPWELL_GATEWAY_MAX_NUM_WAITING_PER_TENANT": "2",
            },
        )
        try:
            yield Observed(stack, keys, f"http://{address}", served, authority)
        finally:
            stack.close()
