"""Compares the routing policies on four replicas, and measures the time of a routing decision.

    python -m benchmarks.routing [--quick] [--model DIR] [--policies NAME,NAME] [--loads 4,24]
                                 [--pool-shares 0.25,0.5] [--rounds 1] [--json FILE]
    python -m benchmarks.routing --only decisions

Each of the four replicas has one compute thread and a small pool. The load is conversations of
several turns that share system prompts (benchmarks/routing/conversations.py). Each policy runs with
few and with many concurrent requests. Many more conversations are open than run at the same time.
The working set is the blocks of all open conversations. Each value of --pool-shares is the size of
one replica's pool, as a fraction of the working set. If the four pools together are larger than the
working set, the whole working set can be cached, provided that each conversation stays at its
replica. Afterwards decisions of the cache-aware policy are timed with 4 and with 64 replicas and an
index of a million blocks. Tables go to standard output, progress to standard error.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import add_model, count, counts, make_parser, positive
from benchmarks.common.console import log, show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import vocab_size
from benchmarks.common.runs import run_measurement
from benchmarks.common.tables import table_text
from benchmarks.routing.conversations import Workload
from benchmarks.routing.decision import PROMPT_TOKENS, DecisionFigures, measure_decisions
from benchmarks.routing.policies import BLOCK_SIZE, PolicyFigures, measure_policies
from services.gateway.core.fleet.routing import POLICIES

LOADS, QUICK_LOADS = (4, 24), (2,)
NUM_REPLICAS, QUICK_NUM_REPLICAS = 4, 2
POOL_SHARES, QUICK_POOL_SHARES = (0.25, 0.5), (0.25,)
POLICIES_PART, DECISIONS_PART = "policies", "decisions"
REPLICAS, QUICK_REPLICAS = (4, 64), (4,)
INDEX_BLOCKS, QUICK_INDEX_BLOCKS = 1_000_000, 40_000
DECISIONS, QUICK_DECISIONS = 500, 20


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the measurement."""

    model: Path
    parts: tuple[str, ...]
    policies: tuple[str, ...]
    loads: tuple[int, ...]
    pool_shares: tuple[float, ...]
    num_rounds: int
    quick: bool
    json_file: Path | None

    def workload(self) -> Workload:
        """The conversations. Each has 48 tokens of system prompt and 15 turns of 64 tokens, which
        are 1008 tokens, since the demo model's limit is 1024. With --quick they are shorter.
        """
        return Workload(
            num_conversations=8 if self.quick else 96,
            num_turns=3 if self.quick else 15,
            num_system_prompts=2 if self.quick else 8,
            system_tokens=48,
            user_tokens=32 if self.quick else 48,
            answer_tokens=4 if self.quick else 16,
            num_warm_up=8 if self.quick else 300,
            num_requests=16 if self.quick else 500,
            vocab_size=vocab_size(self.model),
            seed="routing",
        )


async def measure(options: Options, command: str) -> dict[str, Any]:
    """Measures everything, and prints each table when it is complete. Returns all figures."""
    found = machine()
    show(machine_text(found, command))
    by_policy = await _measure_policies(options) if POLICIES_PART in options.parts else []
    decisions = _measure_decisions(options) if DECISIONS_PART in options.parts else []
    return {
        "command": command,
        "machine": found,
        "policies": [asdict(figures) for figures in by_policy],
        "decisions": [asdict(figures) for figures in decisions],
    }


async def _measure_policies(options: Options) -> list[PolicyFigures]:
    workload = options.workload()
    num_replicas = QUICK_NUM_REPLICAS if options.quick else NUM_REPLICAS
    by_policy = []
    for pool_share in options.pool_shares:
        log(f"starting {num_replicas} replicas, each for {pool_share:g} of the working set")
        by_policy += await measure_policies(
            options.policies,
            options.model,
            workload,
            options.loads,
            pool_share,
            options.num_rounds,
            num_replicas,
        )
    show("### Policies", workload_text(workload), policies_table(by_policy))
    return by_policy


def _measure_decisions(options: Options) -> list[DecisionFigures]:
    decisions = []
    for num_replicas in QUICK_REPLICAS if options.quick else REPLICAS:
        log(f"timing decisions among {num_replicas} replicas")
        decisions += measure_decisions(
            num_replicas,
            QUICK_INDEX_BLOCKS if options.quick else INDEX_BLOCKS,
            QUICK_DECISIONS if options.quick else DECISIONS,
        )
    show("### A decision of the cache-aware policy", decisions_table(decisions))
    return decisions


def workload_text(workload: Workload) -> str:
    return (
        f"{workload.num_conversations} open conversations of {workload.num_turns} turns, "
        f"{workload.user_tokens} tokens asked and {workload.answer_tokens} answered in each; "
        f"{workload.num_system_prompts} system prompts of {workload.system_tokens} tokens; a "
        f"working set of {workload.num_blocks(BLOCK_SIZE)} blocks."
    )


def policies_table(found: Sequence[PolicyFigures]) -> str:
    """A table with a row for each policy, load and pool size.

    Rows that differ only in the policy are adjacent.
    """
    return table_text(
        (
            "policy",
            "a pool's share of the working set",
            "at once",
            "hit rate, %",
            "TTFT ms, median",
            "p99",
            "most requests of a replica to the mean",
        ),
        (
            (
                row.policy,
                f"{row.pool_share:g}",
                str(row.at_once),
                f"{100 * row.hit_rate:.1f}",
                f"{row.ttft_median_millis:.0f}",
                f"{row.ttft_p99_millis:.0f}",
                f"{row.spread:.2f}",
            )
            for row in found
        ),
    )


def decisions_table(found: Sequence[DecisionFigures]) -> str:
    """A table with a row for each kind of decision and number of replicas."""
    return table_text(
        (
            f"prompt of {PROMPT_TOKENS} tokens",
            "replicas",
            "blocks in the index",
            "median ms",
            "p99",
        ),
        (
            (
                row.kind,
                str(row.num_replicas),
                f"{row.num_blocks:,}",
                f"{row.median_millis:.3f}",
                f"{row.p99_millis:.3f}",
            )
            for row in found
        ),
    )


def parse_options(argv: Sequence[str]) -> Options:
    parser = make_parser("routing", __doc__)
    add_model(parser)
    add = parser.add_argument
    parts = (POLICIES_PART, DECISIONS_PART)
    add("--only", choices=parts, help="measure only this part (default: both parts)")
    policies = f"routing policies, of {', '.join(POLICIES)} (default: all)"
    add("--policies", type=_policies, default=tuple(POLICIES), metavar="NAME,NAME", help=policies)
    add("--loads", type=counts, help="numbers of concurrent requests (default: 4,24)")
    add(
        "--pool-shares",
        type=_shares,
        help="sizes of a pool as fractions of the working set (default: 0.25,0.5)",
    )
    add(
        "--rounds",
        type=count,
        default=1,
        help="number of rounds of each policy and load (default: 1)",
    )
    add(
        "--quick",
        action="store_true",
        help="use a small workload and index, only to check that the benchmark works",
    )
    add("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    parsed = parser.parse_args(argv)
    return Options(
        parsed.model,
        (parsed.only,) if parsed.only else parts,
        parsed.policies,
        parsed.loads or (QUICK_LOADS if parsed.quick else LOADS),
        parsed.pool_shares or (QUICK_POOL_SHARES if parsed.quick else POOL_SHARES),
        parsed.rounds,
        parsed.quick,
        parsed.json,
    )


def _shares(text: str) -> tuple[float, ...]:
    return tuple(positive(part) for part in text.split(","))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"there is no policy {name!r}")
    return names


def main(argv: Sequence[str]) -> None:
    options = parse_options(argv)
    run_measurement("routing", argv, partial(measure, options), options.json_file)


if __name__ == "__main__":
    main(sys.argv[1:])
