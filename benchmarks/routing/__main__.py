"""What each routing policy gives with four replicas, and what a decision costs.

    python -m benchmarks.routing [--quick] [--model DIR] [--policies NAME,NAME] [--json FILE]

Four replicas with a thread and a small pool each get conversations of several turns that share
system prompts (benchmarks/routing/conversations.py), with few and with many requests at once, once
for each policy; a pool holds a third of what all open conversations have. Then decisions of the
cache-aware policy are timed, with 4 and 64 replicas and an index of a million blocks. Tables go to
standard output, progress to standard error.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.common.arguments import add_model, make_parser
from benchmarks.common.console import log, messages, show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import vocab_size
from benchmarks.common.tables import table_text
from benchmarks.routing.conversations import Workload
from benchmarks.routing.decision import PROMPT_TOKENS, DecisionFigures, measure_decisions
from benchmarks.routing.policies import PolicyFigures, measure_policy
from services.gateway.core.routing import POLICIES

LOADS, QUICK_LOADS = (4, 24), (2,)
REPLICAS, QUICK_REPLICAS = (4, 64), (4,)
INDEX_BLOCKS, QUICK_INDEX_BLOCKS = 1_000_000, 40_000
DECISIONS, QUICK_DECISIONS = 500, 20


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    model: Path
    policies: tuple[str, ...]
    quick: bool
    json_file: Path | None

    def workload(self) -> Workload:
        """The conversations, at most 256 + 8 * 64 tokens long."""
        return Workload(
            num_conversations=8 if self.quick else 48,
            num_turns=3 if self.quick else 8,
            system_tokens=64 if self.quick else 256,
            user_tokens=32 if self.quick else 48,
            answer_tokens=4 if self.quick else 16,
            num_warm_up=8 if self.quick else 150,
            num_requests=16 if self.quick else 400,
            vocab_size=vocab_size(self.model),
            seed="routing",
        )


async def measure(options: Options, command: str) -> dict[str, Any]:
    """Measures everything and prints each table as soon as it is there; returns all figures."""
    found = machine()
    show(machine_text(found, command))
    loads = QUICK_LOADS if options.quick else LOADS
    by_policy = []
    for policy in options.policies:
        log(f"starting four replicas, {policy}")
        by_policy += await measure_policy(policy, options.model, options.workload(), loads)
    show("### Policies", policies_table(by_policy))
    decisions = []
    for num_replicas in QUICK_REPLICAS if options.quick else REPLICAS:
        log(f"timing decisions among {num_replicas} replicas")
        decisions += measure_decisions(
            num_replicas,
            QUICK_INDEX_BLOCKS if options.quick else INDEX_BLOCKS,
            QUICK_DECISIONS if options.quick else DECISIONS,
        )
    show("### A decision of the cache-aware policy", decisions_table(decisions))
    return {
        "command": command,
        "machine": found,
        "policies": [asdict(figures) for figures in by_policy],
        "decisions": [asdict(figures) for figures in decisions],
    }


def policies_table(found: Sequence[PolicyFigures]) -> str:
    """A row for each policy and load, the loads one after another."""
    return table_text(
        (
            "policy",
            "at once",
            "hit rate, %",
            "TTFT ms, median",
            "p99",
            "most requests of a replica to the mean",
        ),
        (
            (
                row.policy,
                str(row.at_once),
                f"{100 * row.hit_rate:.1f}",
                f"{row.ttft_median_millis:.0f}",
                f"{row.ttft_p99_millis:.0f}",
                f"{row.spread:.2f}",
            )
            for row in sorted(found, key=lambda row: row.at_once)
        ),
    )


def decisions_table(found: Sequence[DecisionFigures]) -> str:
    """A row for each kind of decision and number of replicas."""
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
    """The command line. Ends the process with one sentence when it makes no sense."""
    parser = make_parser("routing", (__doc__ or "").partition("\n")[0])
    add_model(parser)
    parser.add_argument(
        "--policies",
        type=_policies,
        default=tuple(POLICIES),
        metavar="NAME,NAME",
        help=f"of {', '.join(POLICIES)} (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small workload and index: shows that it works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parsed = parser.parse_args(argv)
    return Options(parsed.model, parsed.policies, parsed.quick, parsed.json)


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"there is no policy {name!r}")
    return names


def main(argv: Sequence[str]) -> None:
    """Measures, prints, writes."""
    options = parse_options(argv)
    begun = time.monotonic()
    command = shlex.join(["python", "-m", "benchmarks.routing", *argv])
    try:
        results = uvloop.run(measure(options, command))
    except* (RuntimeError, TimeoutError, httpx.HTTPError) as failed:
        log("\n".join(messages(failed)))
        sys.exit(1)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(results, indent=2) + "\n")
    log(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
