"""No input of a client may block the gateway's event loop, leak memory, or leave a file open."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import httpx

from benchmarks.common.process_usage import usage_of
from benchmarks.soak.attack.attacks import Target, attack, grpc_message
from benchmarks.soak.attack.bodies import BODIES, costly
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import until
from tests.slowness import slowness

ROOT = Path(__file__).parents[4]
SEED = 1
NUM_ATTACKERS = 6
ATTACK_SECONDS = 3.0
# The maximum seconds of uninterrupted work of the event loop, and of a pause that clients notice,
# in which other threads may compute.
MOST_WORK, MOST_PAUSE = 0.02, 0.1
MOST_GROWTH_BYTES = 50e6
_SERVING = re.compile(r"HTTP on (\S+), gRPC on (\S+)")


class WatchedGateway:
    """A running process of tests.gateway.watched_gateway."""

    def __init__(self, *flags: str) -> None:
        self.log: list[str] = []
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.watched_gateway", *flags],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'gen'}"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def addresses(self) -> tuple[str, str] | None:
        for line in tuple(self.log):
            if (match := _SERVING.search(line)) is not None:
                return match[1], match[2]
        return None

    async def pauses(self) -> dict[str, float]:
        return await asyncio.to_thread(self._pauses)

    def close(self) -> None:
        self._child.kill()
        self._reader.join()
        self._child.communicate()

    def _pauses(self) -> dict[str, float]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        pauses: dict[str, float] = json.loads(self._child.stdout.readline())
        return pauses

    def _read(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self.log.append(line)


@contextmanager
def watched(model: Path, scheduler: str, *flags: str) -> Iterator[WatchedGateway]:
    listen = ("--http-address", "127.0.0.1:0", "--address", "127.0.0.1:0")
    gateway = WatchedGateway("--model", str(model), "--schedulers", scheduler, *listen, *flags)
    try:
        yield gateway
    finally:
        gateway.close()


async def ready(gateway: WatchedGateway, key: str = "") -> Target:
    """Waits until the gateway serves, and sends a first request. Returns the gateway's addresses,
    as the target of attacks.
    """
    await until(lambda: gateway.addresses() is not None)
    addresses = gateway.addresses()
    assert addresses is not None
    target = Target(*addresses, key)
    async with httpx.AsyncClient(base_url=f"http://{target.http}", timeout=60) as http:
        async with asyncio.timeout(60):
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        headers = {"Authorization": f"Bearer {key or None}"}
        warm = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        answer = await http.post("/v1/chat/completions", json=warm, headers=headers)
        assert answer.status_code == 200, answer.text
    return target


def long_context() -> FakeScheduler:
    """A scheduler of a model with a large context, so that large prompts are not refused."""
    return FakeScheduler(max_model_len=131_072, max_request_tokens=131_072, answer=[70] * 1000)


async def slow_twice(
    gateway: WatchedGateway, send: Callable[[], Awaitable[None]]
) -> dict[str, float]:
    """Sends an input. If it causes too long pauses of the event loop, sends it again, because the
    machine may have caused the pauses. Returns the pauses if they are too long again, otherwise an
    empty dictionary.
    """
    pauses: dict[str, float] = {}
    for _ in range(2):
        await gateway.pauses()
        await send()
        pauses = await gateway.pauses()
        slow = slowness()
        if pauses["work"] <= MOST_WORK * slow and pauses["pause"] <= MOST_PAUSE * slow:
            return {}
    return pauses


async def test_no_body_holds_the_loop(model: Path):
    scheduler = long_context()
    slow = {}
    async with scheduler.running() as address:
        with watched(model, address) as gateway:
            target = await ready(gateway)
            async with httpx.AsyncClient(base_url=f"http://{target.http}", timeout=60) as http:

                async def send(name: str) -> None:
                    path, body = costly(name)
                    answer = await http.post(path, json=body)
                    assert answer.status_code < 500, (name, answer.text[:200])

                for name in BODIES:
                    if found := await slow_twice(gateway, partial(send, name)):
                        slow[name] = found

            async def send_message(seed: int) -> None:
                await grpc_message(target, Random(seed))

            for seed in range(12):
                if found := await slow_twice(gateway, partial(send_message, seed)):
                    slow[f"message {seed}"] = found
            assert target.defects == []
    assert slow == {}


async def test_seconds_of_hostility_leave_nothing(model: Path):
    await leave_nothing(model)


async def leave_nothing(model: Path, key: str = "") -> None:
    """Attacks a gateway for some seconds. It must log no error, close files and free memory. If
    `key` is given, the gateway requires the API key "right", and the attackers send `key`.
    """
    scheduler = long_context()
    async with scheduler.running() as address:
        flags = ("--api-keys", "right") if key else ()
        with watched(model, address, *flags) as gateway:
            target = await ready(gateway, "right" if key else "")
            target.key = key

            async def attacker(number: int) -> None:
                draw = Random(f"{SEED}/{number}")
                while loop.time() < end:
                    await attack(target, draw)

            loop = asyncio.get_running_loop()
            before = usage_of(gateway.pid)
            await gateway.pauses()
            end = loop.time() + ATTACK_SECONDS
            await asyncio.gather(*map(attacker, range(NUM_ATTACKERS)))
            pauses = await gateway.pauses()
            await until(lambda: scheduler.num_running == 0)
            await until(lambda: usage_of(gateway.pid).num_files <= before.num_files + 2)
            assert target.defects == []
            assert not [line for line in gateway.log if "Traceback" in line], "".join(gateway.log)
            assert pauses["work"] < 2 * MOST_WORK * slowness(), pauses
            await until(lambda: usage_of(gateway.pid).rss - before.rss < MOST_GROWTH_BYTES)
