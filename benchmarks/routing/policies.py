"""Compares the routing policies.

For each policy a gateway runs, one after another, with the same replicas.
"""

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.common.console import log
from benchmarks.common.figures import interleaved, percentile
from benchmarks.common.gateways import running
from benchmarks.routing.conversations import ConversationClient, TurnFigures, Workload
from benchmarks.soak.replicas import Replicas
from services.cli.processes.supervisor import RestartPolicy
from services.cli.settings import UpSettings

BLOCK_SIZE = 16

COUNT_SECONDS = 30.0
"""The time limit in seconds until the replicas have counted all finished requests of a run."""


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """The figures of one policy with `at_once` concurrent requests: cache hits, times to the first
    token, and how evenly the replicas are loaded.
    """

    policy: str
    at_once: int
    pool_share: float
    """The size of one replica's pool, as a fraction of the blocks of all open conversations."""
    num_requests: int
    hit_rate: float
    """Ratio of cached prompt tokens to prompt tokens."""
    ttft_median_millis: float
    ttft_p99_millis: float
    spread: float
    """Number of requests of the busiest replica, divided by the mean over replicas."""


@dataclass(slots=True)
class _Taken:
    """The requests of all runs with one policy and one load."""

    turns: list[TurnFigures] = field(default_factory=list)
    num_requests: dict[str, int] = field(default_factory=dict)
    """Maps each replica's address to its number of requests, including the warm-up."""


async def measure_policies(
    policies: Sequence[str],
    model: Path,
    workload: Workload,
    loads: Sequence[int],
    pool_share: float,
    num_rounds: int,
    num_replicas: int,
) -> list[PolicyFigures]:
    """Starts replicas, and runs every policy with every load.

    Each run has a new gateway and its own salt, so that it finds no cached blocks of earlier runs.
    The order of the policies is rotated by one from round to round.
    """
    settings = UpSettings(
        model=model,
        num_threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=1 + round(pool_share * workload.num_blocks(BLOCK_SIZE)),
        replicas=num_replicas,
    )
    found: dict[tuple[int, str], _Taken] = {}
    with tempfile.TemporaryDirectory(prefix="stepwell-routing-") as directory:
        services = Replicas(settings, Path(directory), RestartPolicy(), num_gateways=0)
        async with services as replicas:
            runs = itertools.product(loads, itertools.chain(*interleaved(policies, num_rounds)))
            for number, (at_once, policy) in enumerate(runs):
                taken = found.setdefault((at_once, policy), _Taken())
                gateway = replicas.first_gateway.another("gateway", {"routing_policy": policy})
                async with running(gateway, Path(directory) / f"gateway-{number}.log"):
                    client = ConversationClient(gateway.grpc)
                    await _run(client, gateway.http, workload, at_once, str(number), taken)
                    await client.close()
                log(_progress(policy, at_once, taken))
    return [_figures(policy, load, pool_share, taken) for (load, policy), taken in found.items()]


async def _run(
    client: ConversationClient,
    gateway: str,
    workload: Workload,
    at_once: int,
    salt: str,
    to: _Taken,
) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        before = await _num_finished(http, gateway, 0)
        to.turns += await client.run(workload, at_once, salt)
        total = sum(before.values()) + workload.num_warm_up + workload.num_requests
        for replica, count in (await _num_finished(http, gateway, total)).items():
            to.num_requests[replica] = to.num_requests.get(replica, 0) + count - before[replica]


def _progress(policy: str, at_once: int, taken: _Taken) -> str:
    figures = _figures(policy, at_once, 0.0, taken)
    return (
        f"{policy}, {at_once} at once: hit rate {figures.hit_rate:.2f}, "
        f"p99 {figures.ttft_p99_millis:.0f} ms"
    )


def _figures(policy: str, at_once: int, pool_share: float, taken: _Taken) -> PolicyFigures:
    turns, counts = taken.turns, taken.num_requests.values()
    first_tokens = [1000 * turn.first_token_seconds for turn in turns]
    num_cached = sum(turn.num_cached_tokens for turn in turns)
    return PolicyFigures(
        policy=policy,
        at_once=at_once,
        pool_share=pool_share,
        num_requests=len(turns),
        hit_rate=num_cached / sum(turn.num_prompt_tokens for turn in turns),
        ttft_median_millis=statistics.median(first_tokens),
        ttft_p99_millis=percentile(first_tokens, 99),
        spread=max(counts) / statistics.fmean(counts),
    )


async def _num_finished(http: httpx.AsyncClient, address: str, total: int) -> dict[str, int]:
    """Maps each replica's address to its number of finished requests.

    The numbers are polled until their sum is at least `total`, because replicas count a request
    after its answer has arrived. Raises TimeoutError after COUNT_SECONDS.
    """
    async with asyncio.timeout(COUNT_SECONDS):
        while True:
            answer = await http.get(f"http://{address}/status")
            replicas = answer.raise_for_status().json()["replicas"]
            # The gateway's status lacks the stats of replicas that replied too slowly.
            if all(replica["stats"] for replica in replicas):
                found = {one["address"]: int(one["stats"]["num_finished"]) for one in replicas}
                if sum(found.values()) >= total:
                    return found
            await asyncio.sleep(0.1)
