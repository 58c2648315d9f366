"""Watches the services while they run."""

import asyncio
import re
from collections.abc import Collection, Mapping

from services.gateway.__main__ import Gateway
from services.kvpool.__main__ import PoolService
from services.simulation.explore.answer import Answer
from services.simulation.explore.fleet import Fleet

_LOOK_SECONDS = 0.02
_LONGEST_LOOK_SECONDS = 0.5
_NOTICE_SECONDS = 0.5
"""Enough to notice that a client is gone."""
_NAME = re.compile(r"(?:\w+-)?request-(\d+)(?:-(\d+))?")


def request_name(number: int) -> str:
    return f"request-{number}"


async def watch(fleet: Fleet, answers: Mapping[int, Answer], disturbed: Collection[str]) -> None:
    """Looks at the services again and again. Raises AssertionError if something is wrong that must
    hold at any time: a pool counts its blocks rightly, and a gateway has no sequence whose client
    has its whole answer or is gone. `answers` are what clients have received, by the numbers of
    their requests. The services of `disturbed` may be late.
    """
    seconds = _LOOK_SECONDS
    while True:
        await asyncio.sleep(seconds)
        seconds = min(1.02 * seconds, _LONGEST_LOOK_SECONDS)
        for name, service in fleet.services.items():
            if service.process.is_dead:
                continue
            match service.process.inside:
                case PoolService() as pool:
                    for hosted in pool.host.pools():
                        hosted.pool.check()
                case Gateway() as gateway:
                    _check_gateway(name, gateway, answers, is_late=name in disturbed)


def _check_gateway(
    name: str, gateway: Gateway, answers: Mapping[int, Answer], *, is_late: bool
) -> None:
    fleet = gateway.fleet
    running = [one for replica in fleet.membership.replicas for one in replica.running.values()]
    for inflight in (*running, *fleet._waiting, *fleet.admission):
        if inflight.index not in inflight.mailbox._unfinished:
            raise AssertionError(f"{name} has a sequence that nobody waits for")
        if found := _NAME.fullmatch(inflight.request.request_id):
            answer, index = answers[int(found[1])], int(found[2] or 0)
            if index in answer.finished:
                raise AssertionError(f"{name} has a sequence whose client has the whole answer")
            left_at, now = answer.left_at, asyncio.get_running_loop().time()
            if left_at is not None and now > left_at + _NOTICE_SECONDS and not is_late:
                raise AssertionError(f"{name} has a sequence whose client is gone")
