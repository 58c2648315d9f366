"""Operators' calls: the address of their routes, their effects on schedulers, and failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.errors import Unavailable
from services.common.process.settings import SettingError
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving, until
from tests.plain_http import async_http_client

CALLS = (
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/drain"),
    ("POST", "/undrain"),
    ("GET", "/is_paused"),
    ("GET", "/server_info"),
)


@asynccontextmanager
async def administered(
    model: Path, *schedulers: FakeScheduler, **settings: Any
) -> AsyncIterator[tuple[Serving, httpx.AsyncClient]]:
    """A gateway that serves operators' calls, and an HTTP client at their address."""
    settings = {"admin_address": "127.0.0.1:0"} | settings
    async with serving(model, *schedulers, **settings) as served:
        url = f"http://{served.admin_address}"
        async with async_http_client(base_url=url, timeout=30) as admin:
            yield served, admin


async def post(admin: httpx.AsyncClient, path: str, status: int = 200) -> dict[str, Any]:
    response = await admin.post(path)
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_a_call_reaches_every_replica_and_says_so(model: Path) -> None:
    fakes = [FakeScheduler(), FakeScheduler()]
    async with administered(model, *fakes) as (_, admin):
        addresses = [fake.address for fake in fakes]
        paused = await post(admin, "/pause?mode=keep")
        assert paused == {
            "status": "paused",
            "replicas": [{"address": address, "ok": True} for address in addresses],
        }
        assert (await admin.get("/is_paused")).json() == {
            "is_paused": True,
            "replicas": [
                {"address": address, "ok": True, "is_paused": True} for address in addresses
            ],
        }
        assert (await post(admin, "/resume"))["status"] == "resumed"
        assert (await admin.get("/is_paused")).json()["is_paused"] is False
        for fake in fakes:
            assert fake.operators_calls == ["PAUSE_MODE_KEEP", "resume"]


@pytest.mark.parametrize(
    ("query", "heard"),
    [
        ("", ["PAUSE_MODE_ABORT", "reset, preempt_running=False"]),
        ("?mode=wait", ["PAUSE_MODE_WAIT", "reset, preempt_running=False"]),
        ("?wait_for_inflight_requests=true&clear_cache=false", ["PAUSE_MODE_WAIT"]),
        ("?mode=keep&clear_cache=true", ["PAUSE_MODE_KEEP"]),
    ],
)
async def test_a_pause_is_vllms(model: Path, query: str, heard: list[str]) -> None:
    """A pause aborts requests and clears the prefix cache by default. With mode=keep, the cache is
    not cleared by default.
    """
    fake = FakeScheduler()
    async with administered(model, fake) as (_, admin):
        await post(admin, f"/pause{query}")
        assert fake.operators_calls == heard


async def test_one_replica_is_paused_where_it_is_named(model: Path) -> None:
    one, other = FakeScheduler(), FakeScheduler()
    async with administered(model, one, other) as (_, admin):
        await post(admin, f"/pause?mode=keep&replica={other.address}")
        body = (await admin.get("/is_paused")).json()
        assert body["is_paused"] is False
        assert [replica["is_paused"] for replica in body["replicas"]] == [False, True]
        body = await post(admin, "/pause?replica=10.0.0.1:1", status=404)
        assert body["error"]["param"] == "replica"
        assert one.address in body["error"]["message"]
        assert (one.operators_calls, other.operators_calls) == ([], ["PAUSE_MODE_KEEP"])


async def test_what_one_replica_refuses_is_the_status_and_the_others_still_do_it(
    model: Path,
) -> None:
    busy, idle = FakeScheduler(blocks_in_use=True), FakeScheduler()
    async with administered(model, busy, idle) as (_, admin):
        body = await post(admin, "/reset_prefix_cache", status=409)
        assert body["error"]["code"] == "blocks_in_use"
        assert (
            f"1 of 2 replicas did not complete the operation: {busy.address}"
            in body["error"]["message"]
        )
        first, second = body["replicas"]
        assert (first["ok"], first["error"]["code"]) == (False, "blocks_in_use")
        assert second == {"address": idle.address, "ok": True}
        assert idle.operators_calls == ["reset, preempt_running=False"]
        await post(admin, "/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        assert idle.operators_calls[1:] == ["reset, preempt_running=True, reset_connector"]


async def test_replicas_that_are_away_or_hang_are_reported(model: Path) -> None:
    away, hung, fine = FakeScheduler(), FakeScheduler(), FakeScheduler()
    async with administered(model, away, hung, fine) as (_, admin):
        await away.die()
        hung.hang()
        body = await post(admin, "/pause?mode=keep&timeout_seconds=0.3", status=503)
        codes = [replica.get("error", {}).get("code") for replica in body["replicas"]]
        assert codes == ["unavailable", "deadline_exceeded", None]
        assert fine.paused
        body = (await admin.get("/is_paused")).json()
        assert body["replicas"][2]["is_paused"] is True
        await away.start()


async def test_a_replica_that_is_removed_during_a_call_is_reported(model: Path) -> None:
    gone, fine = FakeScheduler(), FakeScheduler()
    async with administered(model, gone, fine) as (served, admin):
        gone.hang()
        pausing = asyncio.create_task(post(admin, "/pause?mode=keep", status=503))
        await until(lambda: gone.operators_calls)
        gone.end_sessions()

        def is_removed() -> bool:
            for source in served.gateway.membership._addresses:
                served.gateway.fleet.set_addresses(source, [fine.address])
            return len(served.gateway.membership.replicas) == 1

        await until(is_removed)
        first, second = (await pausing)["replicas"]
        assert (first["ok"], first["error"]["code"]) == (False, "unavailable")
        assert second == {"address": fine.address, "ok": True}


async def test_a_drained_replica_gets_no_new_requests_and_keeps_those_it_has(model: Path) -> None:
    one, other = FakeScheduler(permits=0), FakeScheduler()
    async with administered(model, one, other, routing_policy="round-robin") as (served, admin):
        ask = {"prompt": "the", "max_tokens": 4}
        tasks = [
            asyncio.create_task(served.http.post("/v1/completions", json=ask)) for _ in range(2)
        ]
        await until(lambda: one.num_running == 1)
        body = await post(admin, f"/drain?replica={one.address}")
        assert body == {
            "status": "draining",
            "replicas": [{"address": one.address, "ok": True, "num_unfinished": 1}],
        }
        await until(lambda: served.gateway.membership.num_ready == 1)
        for _ in range(4):
            assert (await served.http.post("/v1/completions", json=ask)).status_code == 200
        assert (len(one.adds), len(other.adds)) == (1, 5)
        health = (await served.http.get("/health")).json()
        assert health["not_ready"] == {one.address: "an operator drained the replica"}
        one.run_freely()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200, 200]
        await post(admin, f"/undrain?replica={one.address}")
        await until(lambda: served.gateway.membership.num_ready == 2)
        await post(admin, "/drain", status=400)


async def test_server_info_has_settings_without_secrets(model: Path) -> None:
    async with administered(model, FakeScheduler(), admin_key="secret") as (_, admin):
        response = await admin.get("/server_info", headers={"Authorization": "Bearer secret"})
        body = response.json()
        assert "secret" not in response.text
        assert body["settings"]["admin_key"] == "***"
        assert body["settings"]["model"] == str(model)
        assert body["settings"]["max_connections"] == 4096
        assert body["replicas"][0]["stats"]["num_steps"] == 7


async def test_passwords_in_addresses_are_not_shown(model: Path) -> None:
    settings = {
        "otlp_endpoint": "http://me:my@secret@127.0.0.1:1",
        "redis_url": "redis://me:my@secret@127.0.0.1:1/0?password=secret",
    }
    async with administered(model, FakeScheduler(), **settings) as (_, admin):
        shown = (await admin.get("/server_info")).json()["settings"]
    assert shown["otlp_endpoint"] == "http://***@127.0.0.1:1"
    assert shown["redis_url"] == "redis://127.0.0.1:1/0"
    assert shown["api_keys_in_redis"] is False
    assert shown["api_key_cache_seconds"] == 3600.0


async def test_clients_do_not_reach_operators_calls(model: Path) -> None:
    """The address for clients does not have these routes. The operators' address refuses calls
    without a key or with a client's key.
    """
    fake = FakeScheduler()
    async with administered(model, fake, admin_key="operator") as (served, admin):
        for method, path in CALLS:
            for key in ("client", "operator"):
                headers = {"Authorization": f"Bearer {key}"}
                answer = await served.http.request(method, path, headers=headers)
                assert answer.status_code == 404, path
            for headers in ({}, {"Authorization": "Bearer client"}):
                answer = await admin.request(method, path, headers=headers)
                assert answer.status_code == 401, path
        headers = {"Authorization": "Bearer operator"}
        assert (await admin.post("/v1/completions", headers=headers)).status_code == 404
        assert fake.operators_calls == []
        assert (await admin.post("/resume", headers=headers)).status_code == 200


async def test_web_pages_do_not_reach_operators_calls(model: Path) -> None:
    """A browser lets a page of any site post to a local address. It even lets the page read the
    answer if the name of its site resolves to the local address.
    """
    fake = FakeScheduler()
    async with administered(model, fake) as (_, admin):
        for origin in ("https://evil.example", "null"):
            answer = await admin.post("/pause", headers={"Origin": origin})
            assert answer.status_code == 403
        answer = await admin.post("/pause", headers={"Host": "evil.example"})
        assert answer.status_code == 421
        assert fake.operators_calls == []


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("mode=stop", "mode"),
        ("mode=keep&mode=wait", "mode"),
        ("timeout_seconds=0", "timeout_seconds"),
        ("timeout_seconds=nan", "timeout_seconds"),
        ("clear_cache=perhaps", "clear_cache"),
        ("replicas=all", "replicas"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(model: Path, query: str, named: str) -> None:
    fake = FakeScheduler()
    async with administered(model, fake) as (_, admin):
        body = await post(admin, f"/pause?{query}", status=400)
        assert body["error"]["param"] == named
        assert fake.operators_calls == []


async def test_a_unix_socket_is_for_its_user_alone(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    for _ in range(2):  # the second gateway replaces the first one's socket file
        async with serving(model, admin_address=f"unix:{path}") as served:
            assert path.stat().st_mode & 0o777 == 0o600
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
                assert (await admin.get("/is_paused")).json()["is_paused"] is False
            with pytest.raises(Unavailable, match=r"cannot listen on unix:.*in use"):
                async with serving(model, admin_address=f"unix:{path}"):
                    pass
            assert served.admin_address == f"unix:{path}"


async def test_other_machines_need_a_key(model: Path) -> None:
    with pytest.raises(SettingError, match="--admin-key must be given"):
        async with serving(model, admin_address="0.0.0.0:0"):
            pass
    async with serving(model, admin_address="0.0.0.0:0", admin_key="key") as served:
        port = served.admin_address.rpartition(":")[2]
        async with async_http_client(base_url=f"http://127.0.0.1:{port}") as admin:
            assert (await admin.post("/resume")).status_code == 401


async def test_by_default_there_is_no_such_address(served: Serving) -> None:
    assert served.admin_address == ""
