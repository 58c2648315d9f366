"""Random worlds with all features. Each world is run to its end, with invariants checked at every
step. Then its log is replayed, bit for bit. `python -m tests.worlds` runs more worlds
(docs/contributing.md).
"""

from collections import Counter

from tests.worlds.generator import FAMILIES
from tests.worlds.run import live_world
from tests.worlds.world import Incident

NUM_WORLDS = 192
RARE = (
    *("preemptions", "hits", "drafts", "loads", "copies", "STOP", "ABORT", "ERROR"),
    "worlds in which steps were put off",
    *(f"blocks {done} tiers" for done in ("stored in", "loaded from", "damaged in", "replaced in")),
)


def test_worlds_keep_what_must_hold_and_their_logs_replay() -> None:
    happened: Counter[str] = Counter()
    for number in range(NUM_WORLDS):
        live_world(number, happened)
    for name in (*FAMILIES, *(incident.name for incident in Incident), *RARE):
        assert happened[name] >= 2, f"{name} hardly happened: {happened}"
