"""The route /activity/overview: what operators and tenants see of the fleet."""

import asyncio
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from services.common.keys.api_keys import TenantRecord
from services.common.rpc.protocol import PROTOCOL
from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.options.viewer.overview import fleet_watch
from services.gateway.options.viewer.overview.fleet_watch import PAGE_SERIES, FleetWatch
from services.gateway.options.viewer.overview.overview_document import overview_document, redis_uses
from tests.certificates import LOOPBACK, ONE_DAY, Authority, Files
from tests.gateway.documented import Documented
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.keyring import FileKeyring, bearer
from tests.gateway.serving import Serving, serving, until
from tests.gateway.streams import Stream
from tests.plain_http import async_http_client
from tests.redis_servers import needs_redis, redis_server
from tools.reference_pages import ALL_SPECS

PATH = "/activity/overview"
KEYS = ("one", "two", "three")
OPERATOR = {"admin_address": "127.0.0.1:0", "admin_key": "operator"}
REPLICA = (
    "# HELP vllm:kv_cache_usage_perc Usage.\n# TYPE vllm:kv_cache_usage_perc gauge\n"
    "vllm:kv_cache_usage_perc{labels} 0.97\n"
    "# HELP process_start_time_seconds Start.\n# TYPE process_start_time_seconds gauge\n"
    "process_start_time_seconds{labels} 5\n"
)


@pytest.fixture
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a new sample for each request of a test."""
    monkeypatch.setattr(fleet_watch, "LOOK_SECONDS", 0.0)


async def overview(http: httpx.AsyncClient, key: str = "") -> dict[str, Any]:
    answer = await http.get(PATH, headers=bearer(key) if key else {})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_the_page_reads_metrics_that_there_are() -> None:
    assert set(PAGE_SERIES) <= {spec.served_name for spec in ALL_SPECS.values()}


@pytest.mark.usefixtures("always_new")
async def test_an_operator_sees_all_tenants_and_a_tenant_only_itself(model: Path) -> None:
    """Two requests of tenant two run and one waits, until tenant one's answers and a refusal of
    tenant three.
    """
    scheduler = FakeScheduler(permits=0, max_num_seqs=1)
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    async with (
        serving(model, scheduler, api_keys=KEYS, **OPERATOR) as served,
        async_http_client(base_url=f"http://{served.admin_address}") as admin,
    ):
        await overview(admin, "operator")
        streams = [Stream(served, headers=bearer("two")) for _ in range(3)]
        await until(lambda: scheduler.num_running == 2 and served.gateway.fleet.num_waiting == 1)
        (two,) = (await overview(admin, "operator"))["tenants"]
        assert (two["tenant"], two["num_running"], two["num_waiting"]) == ("key-2", 2, 1)
        scheduler.run_freely()
        for stream in streams:
            await stream.task
        assert (await overview(served.http, "one"))["tenants"] == []
        for key in ("one", "one", "three"):
            sent = {"json": body | {"top_p": 7 if key == "three" else 1}, "headers": bearer(key)}
            await served.http.post("/v1/completions", **sent)
        answer = await served.http.get(PATH, headers=bearer("one"))
        Documented((await served.http.get("/openapi.json")).json()).check(PATH, answer)
        (one,) = answer.json()["tenants"]
        assert (one["tenant"], one["num_tokens_of_minute"]) == ("key-1", 2 * (3 + 2))
        shown = await overview(admin, "operator")
        assert {each["tenant"] for each in shown["tenants"]} == {"key-1", "key-2", "key-3"}
        assert sum(each["share_of_minute"] for each in shown["tenants"]) == pytest.approx(1)
        refused = {each["tenant"]: each["num_refused_of_hour"] for each in shown["tenants"]}
        assert refused == {"key-1": 0, "key-2": 0, "key-3": 1}
        ((reason, of_minute, of_hour),) = (tuple(each.values()) for each in shown["refusals"])
        assert (reason, of_minute, of_hour) == ("invalid_argument", 1, 1)
        assert (await admin.get(PATH, headers=bearer("one"))).status_code == 401


@needs_redis
@pytest.mark.usefixtures("always_new")
async def test_certificates_versions_and_redis(model: Path, tmp_path: Path) -> None:
    authority = Authority()
    served_files = Files(tmp_path / "tls").write(
        authority.issue(*LOOPBACK, seconds=3 * ONE_DAY), authority
    )
    ends = x509.load_pem_x509_certificate(served_files.cert.read_bytes()).not_valid_after_utc
    with redis_server(tmp_path / "redis") as redis:
        settings = {"redis_url": redis.url, "api_keys_in_redis": True, "num_ready": 0, **OPERATOR}
        tls = served_files.tls(mutual=False)
        async with (
            serving(model, FakeScheduler(), tls=tls, **settings) as served,
            async_http_client(base_url=f"http://{served.admin_address}") as admin,
        ):
            shown = await overview(admin, "operator")
            (gateway,) = shown["processes"]
            assert (gateway["service"], gateway["instance"]) == ("gateway", shown["gateway"])
            release = (version("stepwell"), str(PROTOCOL))
            assert (gateway["version"], gateway["protocol"]) == release
            (certificate,) = gateway["certificates"]
            left = (ends - datetime.now(UTC)).total_seconds()
            assert certificate["seconds_left"] == pytest.approx(left, abs=30)
            assert shown["redis"]["seconds"] < 0.5
            assert {"list of replicas", "API keys", "limits of tenants"} < {
                use["name"] for use in shown["redis"]["uses"]
            }
            redis.stop()

            async def is_lost() -> bool:
                redis_now = (await overview(admin, "operator"))["redis"]
                works = {use["name"]: use["works"] for use in redis_now["uses"]}
                return redis_now["error"] != "" and works["list of replicas"] is False

            async with asyncio.timeout(30):
                while not await is_lost():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


async def firing(served: Serving) -> dict[str, list[str]]:
    alerts = (await overview(served.http))["alerts"]
    return {
        alert["name"]: [alert["severity"], alert["summary"], str(alert["ended_unix_seconds"])]
        for alert in alerts
    }


@pytest.mark.usefixtures("always_new")
async def test_an_alert_fires_after_its_time_and_then_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica's cache is full for ten minutes, and another one has no metrics for a minute. A
    third one has not started yet, so it is not ready, but not down.
    """
    full, silent = FakeScheduler(metrics=REPLICA), FakeScheduler()
    now = 0.0
    async with serving(model, full, silent) as served:
        served.gateway.membership.set_addresses("dns", ["127.0.0.1:1"])
        monkeypatch.setattr(fleet_watch.time, "monotonic", lambda: now)
        assert await firing(served) == {}
        now = 60.0
        down = f"{silent.address} is not scraped"
        assert await firing(served) == {"StepwellTargetDown": ["critical", down, "None"]}
        assert full.metrics is not None
        now = 600.0
        not_ready = "StepwellReplicaNotReady"
        assert set(await firing(served)) == {"StepwellTargetDown", "StepwellKVCacheFull", not_ready}
        full.metrics = full.metrics.replace("0.97", "0.5")
        now = 620.0
        shown = await overview(served.http)
        (*_, ended) = shown["alerts"]
        assert (ended["name"], ended["severity"]) == ("StepwellKVCacheFull", "warning")
        assert ended["summary"].endswith("has been 97 % full for ten minutes")
        assert ended["ended_unix_seconds"] == shown["unix_seconds"]
        now += 3601
        assert set(await firing(served)) == {"StepwellTargetDown", not_ready}


async def test_the_page_of_each_model_shows_all_models_that_the_key_may_use(
    model: Path, tmp_path: Path
) -> None:
    ring = FileKeyring(tmp_path / "keys.json")
    of_all = await ring.add(TenantRecord("all"))
    of_tiny = await ring.add(TenantRecord("one"), models=("tiny",))
    tiny, large = FakeScheduler(metrics=""), FakeScheduler(model_name="large", metrics="")
    settings = {"served_model_name": "tiny", "further": [large], "api_key_file": ring.path}
    async with serving(model, tiny, **settings) as served:
        for fake in (tiny, large):
            labels = f'engine="r",model_name="{fake.model_name}",replica="{fake.address}"'
            fake.metrics = REPLICA.replace("{labels}", f'{{{labels},service="scheduler"}}')

        async def shown(key: str, path: str = "") -> list[str | None]:
            answer = await served.http.get(f"{path}{PATH}", headers=bearer(key))
            return [process["model_name"] for process in answer.json()["processes"]]

        assert await shown(of_all) == [None, "large", "tiny"]
        assert await shown(of_all, "/models/large") == [None, "large", "tiny"]
        assert await shown(of_tiny) == [None, "tiny"]


HOSTILE = (
    "vllm:request_queue_time_seconds_bucket{%s} 1",
    'vllm:request_queue_time_seconds_bucket{le="x",%s} 1',
    'vllm:request_queue_time_seconds_bucket{le="NaN",%s} 1e308',
    'vllm:request_queue_time_seconds_bucket{le="+Inf",%s} 1e308',
    "process_start_time_seconds{%s} NaN",
    'process_start_time_seconds{rank="x",service="?",%s} 1e308',
    'process_start_time_seconds{rank="x",service="?",%s} 1e308',
    "process_start_time_seconds 1 2 3",
    "stepwell_tls_certificate_seconds_left{%s} -1",
    "stepwell_recoveries_total{%s} -1e308",
    "stepwell_recoveries_total{%s} 1e308",
    'stepwell_recoveries_total{lost="x",%s} x',
    'stepwell_recoveries_total{lost="\\"",%s} 1e308',
    'stepwell_prefix_index_state{lost="}{ ",%s} 1',
    "stepwell_discovery_up{{{{ 1",
    "up{%s} 0",
)


async def test_no_metrics_of_a_replica_end_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line occurs twice, in families of any name, at times that a rule's windows contain."""
    written = [line.replace("%s", 'replica="127.0.0.1:1"') for line in HOSTILE]
    names = {line.partition("{")[0].partition(" ")[0] for line in written}
    text = "".join(f"\n# HELP {name} x\n{line}" for name in names for line in written * 2)

    async def collect() -> bytes:
        return text.encode()

    now = 0.0
    monkeypatch.setattr(fleet_watch.time, "monotonic", lambda: now)
    watch = FleetWatch("g", collect)
    watch.links.append(SchedulerLinks("g", 1.0))
    for address in ("127.0.0.1:1", "127.0.0.1:2"):
        watch.links[0].make(address).was_opened = True
    for _ in range(9):
        now += 30
        await watch.look()
        json.dumps(overview_document(watch, None), allow_nan=False)
        list(redis_uses(watch.store))
    firing = {alert.rule.name for alert in watch.alerts.listed(watch.store.now)}
    assert "StepwellTargetDown" in firing


async def test_a_sample_serves_all_callers_for_some_seconds() -> None:
    num_samples = 0

    async def collect() -> bytes:
        nonlocal num_samples
        num_samples += 1
        return b""

    watch = FleetWatch("g", collect)
    await asyncio.gather(*(watch.look() for _ in range(9)))
    assert num_samples == 1
