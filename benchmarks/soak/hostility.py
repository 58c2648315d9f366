"""Attacks the four services. Measures the pauses of another client's streams at the same time.

    python -m benchmarks.soak hostility --minutes 10 [--key KEY] [--model DIR] [--seed N]

With --key the gateway requires that API key, and all clients send it. Some attacks then send a
wrong key or no key.

A separate process sends attacks of every kind (benchmarks/soak/attack/attacks.py) over HTTP and
gRPC. The seed selects the attacks. The process has the lowest priority, so that it takes little
processor time from the services. During the attacks one client streams one answer after another.
Before the first measurement every block of the KV cache is used once, because the memory of a block
becomes resident at its first use. The exit status is 1 in these cases:

* A pause in the client's streams exceeds the longest pause before the attacks by more than
  MOST_PAUSE_SECONDS.
* A process has grown by more than MOST_GROWTH_BYTES at the end.
* A process has more open files at the end, or a server error was seen.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from random import Random

import httpx
import uvloop

from benchmarks.common.arguments import add_model, count, make_parser, positive
from benchmarks.common.figures import percentile
from benchmarks.common.process_usage import usage_of
from benchmarks.common.stack import Stack
from benchmarks.soak.attack.attacks import Target, attack
from services.cli.settings import UpSettings

MOST_PAUSE_SECONDS, MOST_GROWTH_BYTES, MORE_FILES = 0.05, 50_000_000, 8
CALM_SECONDS, SETTLE_SECONDS = 15.0, 40.0
NUM_BLOCKS, BLOCK_SIZE, PROMPT_BLOCKS = 2000, 16, 50
REFUSED_FOR_LOAD = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)


async def longest_pauses(http: str, model: str, seconds: float, key: str = "") -> list[float]:
    """Streams one answer after another. Returns the sorted pauses between events, in seconds.

    Raises httpx.HTTPStatusError if a request is refused for a reason other than load.
    """
    pauses: list[float] = []
    body = {"model": model, "prompt": "class Point:", "max_tokens": 128, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(
        base_url=f"http://{http}", headers=headers, timeout=60, trust_env=False
    ) as client:
        while time.monotonic() < end:
            request = body | {"stream": True, "seed": 1}
            async with client.stream("POST", "/v1/completions", json=request) as answer:
                if answer.status_code in REFUSED_FOR_LOAD:
                    await asyncio.sleep(0.1)
                    continue
                answer.raise_for_status()
                last: float | None = None
                async for _ in answer.aiter_bytes():
                    now = time.monotonic()
                    if last is not None:
                        pauses.append(now - last)
                    last = now
    return sorted(pauses)


async def use_every_block(http: str, model: str, key: str = "") -> None:
    """Sends prompts without common prefixes, with as many tokens as fit into all blocks.

    Raises httpx.HTTPStatusError if a prompt is refused.
    """
    draw = Random(0)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=f"http://{http}", headers=headers, timeout=60, trust_env=False
    ) as client:
        for _ in range(NUM_BLOCKS // PROMPT_BLOCKS):
            prompt = [draw.randrange(100, 200) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)]
            body = {"model": model, "prompt": prompt, "max_tokens": 1}
            (await client.post("/v1/completions", json=body)).raise_for_status()


async def attack_for(target: Target, seconds: float, seed: int, num_attackers: int) -> list[str]:
    """Sends attacks for `seconds`. Returns the server errors that were seen."""
    os.nice(19)
    end = time.monotonic() + seconds

    async def attacker(number: int) -> None:
        draw = Random(f"{seed}/{number}")
        while time.monotonic() < end:
            await attack(target, draw)

    await asyncio.gather(*map(attacker, range(num_attackers)))
    return target.defects


async def hostility(options: argparse.Namespace) -> bool:
    """Runs the test and prints the results. Returns whether all results are within their bounds."""
    seconds = 60 * options.minutes
    settings = UpSettings(
        model=options.model,
        max_num_seqs=16,
        num_blocks=NUM_BLOCKS,
        api_keys=(options.key,) if options.key else None,
    )
    async with Stack(settings) as stack:
        name = options.model.resolve().name
        await use_every_block(stack.http, name, options.key)
        await longest_pauses(stack.http, name, CALM_SECONDS / 3, options.key)
        before = {service: usage_of(pid) for service, pid in stack.pids().items()}
        calm = await longest_pauses(stack.http, name, CALM_SECONDS, options.key)
        attackers = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.soak", "hostility"),
            *("--attack", stack.http, stack.grpc),
            *("--seed", str(options.seed), "--attackers", str(options.attackers)),
            *("--minutes", str(options.minutes), "--key", options.key),
            stdout=asyncio.subprocess.PIPE,
        )
        attacked = await longest_pauses(stack.http, name, seconds, options.key)
        output, _ = await attackers.communicate()
        defects = json.loads(output)
        await asyncio.sleep(SETTLE_SECONDS)  # idle connections are closed in less time
        after = {service: usage_of(pid) for service, pid in stack.pids().items()}
    pause = attacked[-1] - calm[-1]
    print(f"pauses, ms: calm {_quantiles(calm)}; attacked {_quantiles(attacked)}")
    good = pause <= MOST_PAUSE_SECONDS and not defects
    for service, usage in after.items():
        grown = usage.rss - before[service].rss
        files = usage.num_files - before[service].num_files
        print(f"{service}: {grown / 1e6:+.1f} MB, {files:+d} files")
        good = good and grown <= MOST_GROWTH_BYTES and files <= MORE_FILES
    print(f"server errors: {len(defects)} {defects[:5]}")
    return good


def _quantiles(pauses: list[float]) -> str:
    at = [percentile(pauses, percent) for percent in (50, 99, 99.9, 100)]
    return "p50 {:.1f}, p99 {:.1f}, p99.9 {:.1f}, longest {:.1f}".format(*(1000 * p for p in at))


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("soak hostility", __doc__)
    add_model(parser)
    add = parser.add_argument
    add("--minutes", type=positive, default=1.0, help="minutes of attacks (default: 1)")
    add("--seed", type=int, default=1, help="seed of the attacks (default: 1)")
    add("--attackers", type=count, default=4, help="number of concurrent attacks (default: 4)")
    add("--key", default="", help="API key of all clients (default: none is needed)")
    add("--attack", nargs=2, metavar=("HTTP", "GRPC"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs the test. Returns 1 if a result was out of bounds."""
    options = parse_options(argv)
    if options.attack is not None:
        http, grpc = options.attack
        target = Target(http, grpc, options.key)
        seconds = 60 * options.minutes
        print(json.dumps(uvloop.run(attack_for(target, seconds, options.seed, options.attackers))))
        return 0
    return 0 if uvloop.run(hostility(options)) else 1
