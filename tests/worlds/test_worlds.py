"""Runs random worlds (simulated replicas with random requests and failures) with all features of a
replica. Invariants are checked at every step, and a replay of the step log must make the same
decisions. `python -m tests.worlds` runs more worlds (docs/contributing.md).
"""

from collections import Counter

from tests.scenarios.connector import HAS_TRANSFERS
from tests.worlds.generator import FAMILIES
from tests.worlds.run import live_world
from tests.worlds.world import Incident

NUM_WORLDS = 112
FURTHER_WORLDS = (183, 190, 934, 1405, 1672)
"""Worlds with rare events.

183, 190: the scheduler copies blocks. 934: a request with drafts ends because of NaN, while a step
in flight still writes to a block of the request's window, which a load could get. 1405: a load
fills a block of a request that the step has preempted, and the step must not zero this block. 1672:
a step without requests evicts a multimodal item.
"""
RARE = (
    *("preemptions", "hits", "drafts", "copies", "STOP", "ABORT", "ERROR"),
    *("worlds in which steps were put off", "waits for contexts", "ends of turns"),
)
OF_TRANSFERS = (
    *("connector", "tier", "loads"),
    *(f"blocks {done} tiers" for done in ("stored in", "loaded from", "damaged in", "replaced in")),
)
"""Names of events that only occur if the scheduler's option `transfers` is installed."""


def test_worlds_keep_what_must_hold_and_their_logs_replay() -> None:
    happened: Counter[str] = Counter()
    for number in (*range(NUM_WORLDS), *FURTHER_WORLDS):
        live_world(number, happened)
    names = {*FAMILIES, *(incident.name for incident in Incident), *RARE, *OF_TRANSFERS}
    for name in names if HAS_TRANSFERS else names.difference(OF_TRANSFERS):
        assert happened[name] >= 2, f"{name} hardly happened: {happened}"
