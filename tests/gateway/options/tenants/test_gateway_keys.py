"""API keys in a file and in Redis: which requests a key allows, and when changes take effect."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from stepwell.gateway.v1 import gateway_pb2

from services.common.keys.api_keys import TenantRecord, key_id_of, new_key
from services.common.process.settings import FileItems, SettingError
from services.common.redis.connection import RedisConnection
from services.common.rpc.status import from_rpc_error
from services.gateway.options.tenants.keys.file_keys import FileKeys
from services.gateway.options.tenants.keys.redis_keys import RedisKeys
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.keyring import FileKeyring, Keyring, RedisKeyring, bearer
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until
from tests.redis_servers import RedisServer, needs_redis, redis_server

ACME, OTHER = TenantRecord("acme"), TenantRecord("other")
BODY = {"prompt": "the", "max_tokens": 2}
PLACES = ["file", pytest.param("redis", marks=needs_redis)]


@asynccontextmanager
async def keyed(
    model: Path, place: str, tmp_path: Path, request: pytest.FixtureRequest, **settings: Any
) -> AsyncIterator[tuple[Serving, Keyring]]:
    """A gateway whose API keys are in a file or in Redis, and the keyring that changes them. At
    first there is one key, of the tenant "nobody".
    """
    ring: Keyring
    if place == "file":
        ring = FileKeyring(tmp_path / "keys.json")
        given: dict[str, Any] = {"api_key_file": ring.path}
    else:
        server = request.getfixturevalue("shared_redis")
        server.ask("FLUSHALL")
        ring = RedisKeyring(server.url)
        given = {"api_keys_in_redis": True, "redis_url": server.url}
    await ring.add(TenantRecord("nobody"))
    try:
        async with serving(model, FakeScheduler(), **given, **settings) as served:
            yield served, ring
    finally:
        if isinstance(ring, RedisKeyring):
            await ring.redis.close()


async def post(served: Serving, key: str, **fields: Any) -> httpx.Response:
    return await served.http.post("/v1/completions", json=BODY | fields, headers=bearer(key))


async def refused(served: Serving, key: str) -> tuple[int, str]:
    answer = await post(served, key)
    return answer.status_code, answer.json()["error"]["code"]


async def becomes(served: Serving, key: str, status: int) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await post(served, key)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("place", PLACES)
async def test_a_key_serves_as_soon_as_it_is_made_and_until_it_is_revoked(
    model: Path, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with keyed(model, place, tmp_path, request) as (served, ring):
        key = await ring.add(ACME)
        assert (await post(served, key)).is_success
        assert await refused(served, key[:-1] + ("A" if key[-1] != "A" else "B")) == (
            401,
            "invalid_api_key",
        )
        assert await refused(served, "sk-aaaaaaaaaaaa-" + 43 * "A") == (401, "invalid_api_key")
        assert await refused(served, "other") == (401, "invalid_api_key")
        await ring.revoke(key)
        await becomes(served, key, 401)
        assert await refused(served, key) == (401, "revoked_api_key")


@pytest.mark.parametrize("place", PLACES)
async def test_a_key_that_expires_is_refused_by_that_name(
    model: Path, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with keyed(model, place, tmp_path, request) as (served, ring):
        soon = await ring.add(ACME, expires=int(time.time()) + 2)
        assert (await post(served, soon)).is_success
        await becomes(served, soon, 401)
        assert await refused(served, soon) == (401, "expired_api_key")
        async with served.openai(api_key=soon) as client:
            with pytest.raises(openai.AuthenticationError, match="expired at 20"):
                await client.completions.create(model="tiny", prompt="a")


@pytest.mark.parametrize("place", PLACES)
async def test_a_model_that_a_key_may_not_use_is_refused_in_every_call(
    model: Path, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with keyed(model, place, tmp_path, request) as (served, ring):
        key = await ring.add(ACME, models=("bigger",))
        headers = bearer(key)
        answers = {
            "/v1/completions": BODY,
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [5]},
        }
        for path, body in answers.items():
            answer = await served.http.post(path, json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_found")
        # The key allows the model "bigger", which the gateway does not serve.
        assert (await post(served, key, model="bigger")).status_code == 404
        listed = await served.http.get("/v1/models", headers=headers)
        assert listed.json()["data"] == []
        assert (await served.http.get("/v1/models/tiny", headers=headers)).status_code == 403
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        listed = await served.stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=metadata)
        assert list(listed.models) == []
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await served.stub.Generate(
                gateway_pb2.GenerateRequest(text="a"), metadata=metadata
            ).read()
        assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert from_rpc_error(failed.value).field == "model"
        allowed = await ring.add(ACME, models=("tiny", "bigger"))
        assert (await post(served, allowed)).is_success


async def test_plain_keys_and_those_of_a_file_serve_side_by_side(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with keyed(model, "file", tmp_path, request, api_keys=("plain",)) as (served, ring):
        for key in ("plain", await ring.add(ACME)):
            assert (await post(served, key)).is_success
        assert (await served.http.post("/v1/completions", json=BODY)).status_code == 401


def mount(volume: Path, version: str, text: str) -> Path:
    """Writes a key's file as Kubernetes mounts a secret, or replaces it: the file is a link through
    another link, which is replaced. Returns the file's path.
    """
    (volume / version).mkdir()
    (volume / version / "plain").write_text(text)
    (volume / "..tmp").symlink_to(version)
    (volume / "..tmp").rename(volume / "..data")
    with suppress(FileExistsError):
        (volume / "plain").symlink_to("..data/plain")
    return volume / "plain"


async def test_plain_keys_of_a_file_are_read_again(model: Path, tmp_path: Path) -> None:
    keys = FileItems.read(mount(tmp_path, "..1", "first,second"))
    async with serving(model, FakeScheduler(), api_keys=keys) as served:
        assert (await post(served, "second")).is_success
        mount(tmp_path, "..2", "second\nthird\n")
        await becomes(served, "first", 401)
        assert (await post(served, "second")).is_success
        assert (await post(served, "third")).is_success
        mount(tmp_path, "..3", "")
        await becomes(served, "third", 401)
        assert (await served.http.post("/v1/completions", json=BODY)).status_code == 401


async def test_a_file_that_gets_its_keys_later_serves_nobody_before(
    model: Path, tmp_path: Path
) -> None:
    keys = FileItems.read(mount(tmp_path, "..1", "\n"))
    async with serving(model, FakeScheduler(), api_keys=keys) as served:
        for headers in ({}, bearer("first")):
            answer = await served.http.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 401
        mount(tmp_path, "..2", "first")
        await becomes(served, "first", 200)
        assert (await served.http.post("/v1/completions", json=BODY)).status_code == 401


async def test_a_key_that_stays_keeps_its_tenant(model: Path, tmp_path: Path) -> None:
    """Otherwise the second key would see the traces and sessions of the first one."""
    keys = FileItems.read(mount(tmp_path, "..1", "first,second"))
    async with serving(model, FakeScheduler(), api_keys=keys) as served:
        access = served.gateway.parts.options.access

        async def tenant(key: str) -> str:
            return (await access.authenticate(f"Bearer {key}")).caller_id

        assert (await tenant("first"), await tenant("second")) == ("key-1", "key-2")
        mount(tmp_path, "..2", "third,second")
        await becomes(served, "first", 401)
        assert (await tenant("third"), await tenant("second")) == ("key-3", "key-2")


async def test_a_damaged_file_changes_nothing(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed(model, "file", tmp_path, request) as (served, ring):
        key = await ring.add(ACME)
        assert (await post(served, key)).is_success
        whole = (path := tmp_path / "keys.json").read_text()
        path.write_text(whole[:-5])
        await until(lambda: "it is not JSON" in caplog.text)
        assert (await post(served, key)).is_success
        path.unlink()
        assert (await post(served, key)).is_success
        path.write_text(whole)
        assert (await post(served, await ring.add(OTHER))).is_success


async def test_files_whose_directory_cannot_be_read_change_nothing(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mounted, away = tmp_path / "mounted", tmp_path / "away"
    mounted.mkdir()
    ring = FileKeyring(mounted / "keys.json")
    key = await ring.add(ACME)
    (mounted / "plain").write_text("plain")
    settings = {"api_keys": FileItems.read(mounted / "plain"), "api_key_file": ring.path}
    async with serving(model, FakeScheduler(), **settings) as served:
        mounted.rename(away)
        mounted.write_text("not a directory")
        await until(lambda: "the previous keys stay in use" in caplog.text)
        await asyncio.sleep(1.5)  # both files are looked at once a second
        for known in (key, "plain"):
            assert (await post(served, known)).is_success
        mounted.unlink()
        away.rename(mounted)
        assert (await post(served, await ring.add(OTHER))).is_success


async def test_a_file_that_is_repaired_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    ring = FileKeyring(tmp_path / "keys.json")
    key_id = key_id_of(await ring.add(ACME)) or ""
    keys, whole = FileKeys(ring.path, share_cache=False), ring.path.read_text()
    ring.path.write_text(whole[:-5])
    reading = asyncio.create_task(keys.find(key_id))
    await asyncio.sleep(0)
    time.sleep(0.1)  # noqa: ASYNC251 - a thread reads the damaged file
    ring.path.write_text(whole)
    await reading
    assert await keys.find(key_id) is not None


@pytest.mark.parametrize("text", [None, "{", '{"keys": {"x": {}}}'])
async def test_a_file_that_cannot_be_read_ends_the_start(
    model: Path, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "keys.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingError, match=r"--api-key-file .*keys\.json: "):
        async with serving(model, api_key_file=path):
            pass


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"api_keys_in_redis": True}, "needs --redis-url"),
        ({"api_keys_in_redis": True, "api_key_file": Path("x")}, "exclude each other"),
    ],
)
async def test_settings_that_contradict_one_another_end_the_start(
    model: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SettingError, match=sentence):
        async with serving(model, **settings):
            pass


@needs_redis
async def test_without_redis_known_keys_serve_and_unknown_ones_are_asked_to_come_back(
    model: Path, tmp_path: Path
) -> None:
    """Redis is stopped by a signal, killed, and restarted without its data."""
    with redis_server(tmp_path / "redis") as server:
        ring = RedisKeyring(server.url)
        known, unknown = await ring.add(ACME), await ring.add(ACME)
        settings = {"api_keys_in_redis": True, "redis_url": server.url}
        async with serving(model, FakeScheduler(), **settings) as served:
            assert (await post(served, known)).is_success
            server.stop()
            for _ in range(3):
                assert (await post(served, known)).is_success
                began = time.monotonic()
                answer = await post(served, unknown)
                assert time.monotonic() - began < 5, "a call of Redis ends after half a second"
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "api_keys_unavailable"
                assert int(answer.headers["retry-after-ms"]) >= 1000
            server.go_on()
            await becomes(served, unknown, 200)
            server.kill()
            never_seen = await _key_made_elsewhere(tmp_path)
            await becomes(served, never_seen, 503)
            assert (await post(served, known)).is_success
            server.start()  # Redis has lost all data
            await asyncio.sleep(0)
            for _ in range(20):
                assert (await post(served, known)).is_success
                assert (await post(served, never_seen)).status_code == 503
                await asyncio.sleep(0.1)
            made_again = await ring.add(ACME)
            await becomes(served, made_again, 200)
            await becomes(served, known, 401)
        await ring.redis.close()


@needs_redis
async def test_new_keys_serve_while_many_clients_send_new_and_unknown_keys(
    shared_redis: RedisServer,
) -> None:
    shared_redis.ask("FLUSHALL")
    ring = RedisKeyring(shared_redis.url)
    made = [str(key_id_of(await ring.add(ACME))) for _ in range(100)]
    unknown = [new_key()[1] for _ in range(400)]
    keys = RedisKeys(RedisConnection(shared_redis.url), cache_seconds=60.0, share_cache=False)
    following = asyncio.create_task(keys.run())
    found = await asyncio.gather(*(keys.find(key_id) for key_id in [*unknown, *made, *made]))
    assert found[:400] == [None] * 400
    assert [known and known.record.key_id for known in found[400:]] == made * 2
    assert [keys.known(key_id) for key_id in made] == found[-100:]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await ring.redis.close()


async def _key_made_elsewhere(tmp_path: Path) -> str:
    return await FileKeyring(tmp_path / "elsewhere.json").add(ACME)


@needs_redis
async def test_known_keys_serve_without_redis_for_a_bounded_time(
    model: Path, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as server:
        ring = RedisKeyring(server.url)
        key = await ring.add(ACME)
        await ring.redis.close()
        settings = {"api_keys_in_redis": True, "redis_url": server.url}
        async with serving(model, FakeScheduler(), **settings, api_key_cache_seconds=1.0) as served:
            assert (await post(served, key)).is_success
            server.kill()
            await becomes(served, key, 503)


async def test_tenants_have_caches_of_their_own_unless_they_are_to_share_one(
    model: Path, tmp_path: Path
) -> None:
    """The cache salts of two tenants differ even if their clients send the same salt."""

    async def salts(**settings: Any) -> list[str]:
        ring = FileKeyring(tmp_path / "keys.json")
        one, two = await ring.add(ACME), await ring.add(OTHER)
        async with serving(
            model, FakeScheduler(), api_key_file=ring.path, api_keys=("plain",), **settings
        ) as served:
            for key in (one, await ring.add(ACME), two, "plain"):
                for fields in ({}, {"cache_salt": "x"}, {"cache_salt": "acme"}):
                    assert (await post(served, key, **fields)).is_success
            return [add.cache_salt for add in served.scheduler.adds]

    apart = await salts()
    assert apart[0:3] == apart[3:6], "two keys of one tenant"
    assert len(set(apart)) == 9
    assert await salts(share_cache_between_tenants=True) == 4 * ["", "x", "acme"]
    async with serving(model) as served:
        answer = await served.http.post("/v1/completions", json=BODY | {"cache_salt": "a\0b"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


async def test_no_request_runs_before_its_tenants_ceiling(model: Path, tmp_path: Path) -> None:
    ring = FileKeyring(tmp_path / "keys.json")
    key = await ring.add(TenantRecord("acme", priority_ceiling=5))
    free = await ring.add(OTHER)
    scheduler = FakeScheduler()
    async with serving(model, scheduler, api_key_file=ring.path) as served:
        for priority in (-1, 0, 5, 6):
            assert (await post(served, key, priority=priority)).is_success
        assert (await post(served, key)).is_success
        assert (await post(served, free, priority=-1)).is_success
        assert [add.priority for add in scheduler.adds] == [5, 5, 5, 6, 5, -1]
    scheduler = FakeScheduler(priority_scheduling=False)
    async with serving(model, scheduler, api_key_file=ring.path) as served:
        assert (await post(served, key)).is_success
        assert scheduler.adds[0].priority == 0
