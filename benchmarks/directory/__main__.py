"""Measures the directory of cached prefixes: bytes and writes in Redis, and the gateway's index.

    python -m benchmarks.directory [--quick] [--blocks N] [--json FILE]

64 nodes cache prompts of 512 blocks. One node has all blocks of a prompt, and up to five other
nodes have the prompt's first blocks. The program starts Redis servers and writes the blocks in two
layouts. Stepwell's layout is a log of packed hashes with snapshots. llm-d's layout, in which only a
fifth of the prompts is written, has a Redis hash for each block. A separate process reads
Stepwell's log into an index, as a gateway does, and looks up every prompt. Each answer is compared
with the written data.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from benchmarks.common.arguments import count, make_parser
from benchmarks.common.console import log
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.redis_servers import redis_server
from benchmarks.common.tables import table_text
from benchmarks.directory.chains import Chain, make_chains
from benchmarks.directory.hash_layout import HashFigures, measure_hashes
from benchmarks.directory.log_layout import LogFigures, write_log
from benchmarks.directory.reader_child import IndexFigures
from benchmarks.directory.visibility import VisibilityFigures, measure_visibility
from services.common.redis.connection import RedisConnection

ROOT = Path(__file__).parents[2]
BLOCKS, QUICK_BLOCKS = 1_000_000, 20_000
EVENTS, QUICK_EVENTS = 300, 20
SHARE_IN_HASHES = 5


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of both layouts, of a gateway's index, and of the visibility of events."""

    log: LogFigures
    hashes: HashFigures
    index: IndexFigures
    visibility: VisibilityFigures
    redis_version: str


def main(argv: Sequence[str]) -> None:
    arguments = parse_options(argv)
    found = machine()
    num_blocks = arguments.blocks or (QUICK_BLOCKS if arguments.quick else BLOCKS)
    num_events = QUICK_EVENTS if arguments.quick else EVENTS
    figures = uvloop.run(measure(num_blocks, num_events))
    command = f"python -m benchmarks.directory --blocks {num_blocks}"
    print(machine_text(found, command), f"Redis {figures.redis_version}.", end="\n\n")
    print(layouts_table(figures), index_table(figures), sep="\n\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": found, **asdict(figures)}, indent=2))


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("directory", __doc__)
    parser.add_argument("--quick", action="store_true", help="20,000 blocks and 20 events")
    parser.add_argument("--blocks", type=count, help="blocks in the index (default: 1,000,000)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(argv)


async def measure(num_blocks: int, num_events: int) -> Figures:
    """Starts Redis servers, measures every figure, and stops the servers."""
    chains = list(make_chains(num_blocks))
    with tempfile.TemporaryDirectory(prefix="stepwell-directory-") as directory:
        with redis_server(Path(directory) / "log") as server:
            redis = RedisConnection(server.url)
            log(f"writing {num_blocks} blocks to the log")
            written = await write_log(redis, chains)
            log("reading them into an index")
            index = await asyncio.to_thread(_read_in_child, server.url, num_blocks)
            log("waiting for events to become visible")
            visibility = await measure_visibility(server.url, num_events)
            version = (await redis.call(lambda client: client.info("server")))["redis_version"]
            await redis.close()
        with redis_server(Path(directory) / "hashes") as server:
            log("writing a part of them as hashes")
            hashes = await _measure_hashes(server.url, chains)
    return Figures(written, hashes, index, visibility, version)


async def _measure_hashes(url: str, chains: Sequence[Chain]) -> HashFigures:
    redis = RedisConnection(url)
    figures = await measure_hashes(redis, chains[: max(1, len(chains) // SHARE_IN_HASHES)])
    await redis.close()
    return figures


def _read_in_child(url: str, num_blocks: int) -> IndexFigures:
    """Runs an index reader in a separate process. Returns its figures, or exits if it fails."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "gen")))
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.directory.reader_child", url, str(num_blocks)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        sys.exit(f"the reader could not measure: {run.stderr.strip().splitlines()[-1]}")
    return IndexFigures(**json.loads(run.stdout))


def layouts_table(figures: Figures) -> str:
    """A table of both layouts in Redis. A block is counted once for each node that caches it."""
    ours, theirs, index = figures.log, figures.hashes, figures.index
    return table_text(
        ("in Redis", "log and snapshots", "hash for each block (llm-d)"),
        (
            ("blocks written", f"{ours.num_blocks:,}", f"{theirs.num_blocks:,}"),
            ("bytes a block, log", f"{ours.log_bytes_per_block:.1f}", "—"),
            ("bytes a block, snapshots", f"{ours.snapshot_bytes_per_block:.1f}", "—"),
            (
                "bytes a block, all",
                f"{ours.log_bytes_per_block + ours.snapshot_bytes_per_block:.1f}",
                f"{theirs.bytes_per_block:.0f}",
            ),
            (
                "blocks written a second",
                f"{ours.blocks_per_second:,.0f}",
                f"{theirs.blocks_per_second:,.0f}",
            ),
            ("log entries written a second", f"{ours.entries_per_second:,.0f}", "—"),
            (
                "look-up of 512 blocks, median ms",
                f"{index.lookup_median_millis:.3f}",
                f"{theirs.lookup_median_millis:.1f}",
            ),
        ),
    )


def index_table(figures: Figures) -> str:
    """A table of the figures of the gateway's index."""
    index, visibility = figures.index, figures.visibility
    return table_text(
        ("index of a gateway", f"{index.num_keys:,} blocks, 64 nodes"),
        (
            ("memory, MB", f"{index.memory_megabytes:.0f}"),
            ("cold start, s", f"{index.cold_start_seconds:.1f}"),
            ("longest pause of its event loop meanwhile, ms", f"{index.longest_pause_millis:.0f}"),
            ("look-up of 512 blocks, median ms", f"{index.lookup_median_millis:.3f}"),
            ("the same, p99 ms", f"{index.lookup_p99_millis:.3f}"),
            (
                "the same with keys made from hashes, median ms",
                f"{index.lookup_from_hashes_median_millis:.3f}",
            ),
            ("event to visibility, median ms", f"{visibility.median_millis:.1f}"),
            ("the same, p99 ms", f"{visibility.p99_millis:.1f}"),
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
