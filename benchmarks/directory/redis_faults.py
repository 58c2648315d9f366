"""Faults of Redis, injected into a real server."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.common.redis_servers import RedisServer
from services.common.redis.connection import RedisConnection


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of Redis. `begin` causes the fault, and `end` ends it."""

    name: str
    begin: Callable[[], Awaitable[object]]
    end: Callable[[], Awaitable[object]]
    is_held: bool = True
    """Whether the fault lasts until `end` is called. If not, the fault is over at once."""


async def _nothing() -> None:
    """Begins or ends a fault that needs no action for that."""


NO_FAULT = Fault("none", _nothing, _nothing)


def single_faults(server: RedisServer, redis: RedisConnection) -> list[Fault]:
    """The faults of a single Redis server."""

    async def stop() -> None:
        server.stop()

    async def go_on() -> None:
        server.go_on()

    async def restart() -> None:
        await asyncio.to_thread(server.end)
        await asyncio.to_thread(server.start)

    async def limit(memory: str) -> None:
        await redis.call(lambda client: client.config_set("maxmemory", memory))

    return [
        Fault(
            "killed, then restarted empty",
            lambda: asyncio.to_thread(server.kill),
            lambda: asyncio.to_thread(server.start),
        ),
        Fault("stopped (SIGSTOP), then continued", stop, go_on),
        Fault("FLUSHALL", lambda: redis.call(lambda client: client.flushall()), _nothing, False),
        Fault("ended (SIGTERM) and restarted at once", restart, _nothing, is_held=False),
        Fault("no memory left, then memory", lambda: limit("1"), lambda: limit("0")),
        Fault(
            "CLIENT PAUSE of 1.5 s",
            lambda: redis.call(lambda client: client.execute_command("CLIENT", "PAUSE", 1500)),
            _nothing,
            is_held=False,
        ),
    ]


def named(text: str, faults: Sequence[Fault]) -> list[Fault]:
    return [fault for fault in faults if text in fault.name]


def node_lost(find: Callable[[], RedisServer]) -> Fault:
    """The loss of a node of a Redis cluster. `find` chooses the node when the fault begins."""
    lost: list[RedisServer] = []

    async def kill() -> None:
        lost.append(await asyncio.to_thread(find))
        await asyncio.to_thread(lost[-1].kill)

    return Fault(
        "a cluster's node killed, then restarted empty",
        kill,
        lambda: asyncio.to_thread(lost[-1].start),
    )


def owner_and_other(nodes: Sequence[RedisServer], log_key: str) -> tuple[RedisServer, RedisServer]:
    """The node of a cluster that stores the log, and another node."""
    owner = next(node for node in nodes if not node.ask("XLEN", log_key).startswith(b"-MOVED"))
    return owner, next(node for node in nodes if node is not owner)
