"""What each policy gives: a gateway with four replicas of their own for each, one after another."""

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from benchmarks.common.console import log
from benchmarks.common.figures import percentile
from benchmarks.routing.conversations import ConversationClient, TurnFigures, Workload
from benchmarks.soak.replicas import Replicas
from services.cli.settings import UpSettings
from services.cli.supervisor import RestartPolicy

NUM_REPLICAS = 4
BLOCK_SIZE = 16
POOL_SHARE = 1 / 3
"""Of the blocks of all open conversations, what fits into the pool of one replica."""

COUNT_SECONDS = 30.0
"""For so long the replicas may take to count the requests of a load."""


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """What a policy gave with so many requests at once."""

    policy: str
    at_once: int
    num_requests: int
    hit_rate: float
    """Cached prompt tokens to prompt tokens."""
    ttft_median_millis: float
    ttft_p99_millis: float
    spread: float
    """Most requests of a replica to their mean."""


async def measure_policy(
    policy: str, model: Path, workload: Workload, loads: Sequence[int]
) -> list[PolicyFigures]:
    """Starts the services with a policy and sends a workload of its own for each load."""
    settings = UpSettings(
        model=model,
        num_threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=1 + round(POOL_SHARE * workload.num_blocks(BLOCK_SIZE)),
        replicas=NUM_REPLICAS,
        routing_policy=policy,
    )
    found = []
    with tempfile.TemporaryDirectory(prefix="stepwell-routing-") as directory:
        services = Replicas(settings, Path(directory), RestartPolicy())
        async with services as replicas, httpx.AsyncClient(trust_env=False) as http:
            client = ConversationClient(replicas.grpc)
            before = dict.fromkeys(await _num_finished(http, replicas.http, 0), 0)
            for at_once in loads:
                own = replace(workload, seed=f"{workload.seed}/{at_once}")
                taken = await client.run(own, at_once)
                total = sum(before.values()) + own.num_warm_up + own.num_requests
                after = await _num_finished(http, replicas.http, total)
                counts = [after[address] - before[address] for address in after]
                before = after
                found.append(_figures(policy, at_once, taken, counts))
                log(f"{policy}, {at_once} at once: hit rate {found[-1].hit_rate:.2f}")
            await client.close()
    return found


def _figures(
    policy: str, at_once: int, taken: Sequence[TurnFigures], counts: Sequence[int]
) -> PolicyFigures:
    first_tokens = [1000 * turn.first_token_seconds for turn in taken]
    num_cached = sum(turn.num_cached_tokens for turn in taken)
    return PolicyFigures(
        policy=policy,
        at_once=at_once,
        num_requests=len(taken),
        hit_rate=num_cached / sum(turn.num_prompt_tokens for turn in taken),
        ttft_median_millis=statistics.median(first_tokens),
        ttft_p99_millis=percentile(first_tokens, 99),
        spread=max(counts) / statistics.fmean(counts),
    )


async def _num_finished(http: httpx.AsyncClient, address: str, total: int) -> dict[str, int]:
    """Requests that ended at each replica, by its address; asks until they are `total` together,
    since the last answers come before they are counted. Raises TimeoutError if they do not.
    """
    async with asyncio.timeout(COUNT_SECONDS):
        while True:
            answer = await http.get(f"http://{address}/status")
            replicas = answer.raise_for_status().json()["replicas"]
            # A replica that is slow to answer has no stats.
            if all(replica["stats"] for replica in replicas):
                found = {one["address"]: int(one["stats"]["num_finished"]) for one in replicas}
                if sum(found.values()) >= total:
                    return found
            await asyncio.sleep(0.1)
