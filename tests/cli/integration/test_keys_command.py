"""`stepwell keys` as a process, for API keys in a file and in Redis."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from services.cli.errors import CommandError
from services.cli.keys.command import main
from services.common.keys.api_keys import key_id_of
from tests.redis_servers import needs_redis, redis_server

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["file", pytest.param("redis", marks=needs_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """The flags that select the key store: a file or Redis."""
    if request.param == "file":
        yield ["--file", str(tmp_path / "keys.json")]
        return
    with redis_server(tmp_path / "redis") as server:
        yield ["--redis-url", server.url]


def keys(*arguments: str, environ: dict[str, str] | None = None) -> Any:
    inherited = {name: value for name, value in os.environ.items() if "STEPWELL" not in name}
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "keys", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**inherited, **(environ or {})},
        timeout=60,
        check=False,
    )


def test_a_key_is_made_listed_and_revoked(place: list[str]) -> None:
    limits = ("--requests-per-minute", "60", "--weight", "2")
    made = keys("create", *place, "--tenant", "acme", "--models", "demo, other", *limits)
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    key_id = key_id_of(key)
    assert key_id is not None
    assert "is not shown again" in made.stderr
    second = json.loads(
        keys(
            *("create", *place, "--tenant", "acme", "--expires-in-days", "1", "--json"),
            *("--tokens-per-minute", "5000"),
        ).stdout
    )
    listed = json.loads(keys("list", *place, "--json").stdout)
    assert {record["id"] for record in listed} == {key_id, second["id"]}
    both = {"weight": 2.0, "requests_per_minute": 60, "tokens_per_minute": 5000}
    assert [record["limits"] for record in listed] == [both, both], "a tenant's keys share limits"
    assert key not in json.dumps(listed)
    assert "sha256" not in json.dumps(listed)
    assert keys("revoke", *place, key).returncode == 0  # also accepts a key instead of its id
    assert keys("revoke", *place, second["id"], "--json").returncode == 0
    assert keys("revoke", *place, second["id"]).returncode == 0, "twice is no error"
    table = keys("list", *place).stdout.splitlines()
    assert len(table) == 3
    assert all("revoked" in line and "acme" in line for line in table[1:])
    assert any("demo, other" in line for line in table)


def test_limits_that_are_set_at_once_are_all_kept(place: list[str]) -> None:
    limits = {
        "requests_per_minute": 60,
        "tokens_per_minute": 5000,
        "max_concurrent_requests": 4,
        "weight": 2.0,
        "priority_ceiling": 3,
        "max_retained_share": 0.5,
    }
    begin = Barrier(len(limits))

    def create(name: str, tenant: str) -> None:
        begin.wait()
        main(["create", *place, "--tenant", tenant, f"--{name.replace('_', '-')}={limits[name]}"])

    with ThreadPoolExecutor(len(limits)) as threads:
        for tenant in ("acme", "umbrella", "initech"):
            list(threads.map(create, limits, [tenant] * len(limits)))
    listed = json.loads(keys("list", *place, "--json").stdout)
    assert [record["limits"] for record in listed] == [limits] * 3 * len(limits)


@needs_redis
def test_a_record_that_was_written_by_hand_can_be_revoked(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        place = ["--redis-url", server.url]
        made = json.loads(keys("create", *place, "--tenant", "acme", "--json").stdout)
        record = {"tenant": "acme", "sha256": "0" * 64, "created": "2026-11-23T02:00:00+00:00"}
        server.ask("HSET", "apikeys:{all}:keys", made["id"], f"'{json.dumps(record)}'")
        assert keys("revoke", *place, made["id"]).returncode == 0
        (listed,) = json.loads(keys("list", *place, "--json").stdout)
        assert listed["state"] == "revoked"


def test_a_limit_is_taken_away_with_0(tmp_path: Path) -> None:
    place = ("--file", str(tmp_path / "keys.json"), "--tenant", "acme", "--json")
    keys("create", *place, "--requests-per-minute", "5", "--max-concurrent-requests", "2")
    made = json.loads(keys("create", *place, "--requests-per-minute", "0").stdout)
    assert made["limits"] == {"max_concurrent_requests": 2}


def test_the_gateways_variables_name_the_place(tmp_path: Path) -> None:
    environ = {"STEPWELL_GATEWAY_API_KEY_FILE": str(tmp_path / "keys.json")}
    assert keys("create", "--tenant", "acme", environ=environ).returncode == 0
    assert len(json.loads(keys("list", "--json", environ=environ).stdout)) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["list"], "give either --file PATH or --redis-url URL"),
        (["list", "--file", "a", "--redis-url", "b"], "give either --file PATH or --redis-url URL"),
        (["list", "--redis-url", "nowhere"], "--redis-url must be redis://"),
        (["create", "--file", "keys"], "--tenant must be given"),
        (["create", "--file", "keys", "--tenant", "a b"], "--tenant must be given"),
        (["create", "--file", "keys", "--tenant", "a", "--weight", "0"], "--weight must be from"),
        (
            ["create", "--file", "keys", "--tenant", "a", "--tokens-per-minute", "-1"],
            "--tokens-per-minute must be a whole number",
        ),
        (["create", "--file", "keys", "--tenant", "a", "--models", ","], "--models must name"),
        (["revoke", "--file", "keys"], "revoke needs the id of a key"),
        (["revoke", "--file", "keys", "abc"], "there is no key with the id 'abc'"),
        (
            ["list", "--redis-url", "redis://127.0.0.1:1"],
            "--redis-url redis://127.0.0.1:1: no server answ",
        ),
        (["create", "--file", "/proc/nowhere/keys", "--tenant", "a"], "--file /proc/nowhere/keys"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    here = [str(tmp_path / "keys.json") if word == "keys" else word for word in arguments]
    with pytest.raises(CommandError) as refused:
        main(here)
    assert refused.value.sentence.startswith(sentence)
    assert "\n" not in refused.value.sentence
    assert refused.value.exit_status in (1, 2)
    assert not list(tmp_path.iterdir())


def test_a_sentence_is_all_that_a_refused_command_writes() -> None:
    done = keys("revoke", "--file", "keys")
    assert done.stderr.startswith("stepwell keys: revoke needs the id of a key")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert done.returncode in (1, 2)
