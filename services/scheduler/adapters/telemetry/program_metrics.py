"""Prometheus metrics of programs (runs of agents) and their contexts (cached blocks)."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.histogram import Histogram
from services.common.telemetry.metric_specs import by_label, histogram_family, replica, single
from services.scheduler.core.policies.continuum.pins import Pins
from services.scheduler.core.policies.observer import ProgramObserver, RecomputationCause
from services.scheduler.core.policies.program.retention import ProgramRetention

_MAX_TOOLS = 64
_OTHERS = "(others)"
CAUSES = tuple(cause.value for cause in RecomputationCause)


class ProgramMetrics(ProgramObserver, Collector):
    """Counts the programs, turns (requests of programs) and contexts of a scheduler."""

    def __init__(self, retention: ProgramRetention | Pins) -> None:
        self._retention = retention
        retention.observer = self
        self._begun: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()
        self._program_seconds = Histogram(replica.PROGRAM_SECONDS)
        self._program_turns = Histogram(replica.PROGRAM_TURNS)
        self._pauses: dict[str, Histogram] = {}
        """Maps a tool to its pauses. All tools after the first `_MAX_TOOLS` share one entry."""

    def began(self, *, is_named: bool) -> None:
        self._begun["id" if is_named else "hash"] += 1

    def returned(self, tool: str, pause_seconds: float) -> None:
        if tool not in self._pauses and len(self._pauses) >= _MAX_TOOLS:
            tool = _OTHERS
        if tool not in self._pauses:
            self._pauses[tool] = Histogram(replica.PAUSE_SECONDS)
        self._pauses[tool].observe(pause_seconds)

    def ended(self, seconds: float, num_turns: int) -> None:
        self._program_seconds.observe(seconds)
        self._program_turns.observe(num_turns)

    def taken(self, num_blocks: int, *, waits: bool) -> None:
        self._taken["waiting" if waits else "paused"] += num_blocks

    def recomputed(self, num_tokens: int, cause: RecomputationCause) -> None:
        self._recomputed[cause.value] += num_tokens

    def collect(self) -> Iterator[Metric]:
        programs = {"in_turn": self._retention.num_in_turn, "paused": self._retention.num_paused}
        yield by_label(replica.PROGRAMS, programs)
        yield single(replica.RETAINED_BLOCKS, self._retention.num_retained_blocks)
        for spec, counts, labels in (
            (replica.PROGRAMS_BEGUN, self._begun, ("id", "hash")),
            (replica.RETAINED_BLOCKS_TAKEN, self._taken, ("paused", "waiting")),
            (replica.RECOMPUTED_TOKENS, self._recomputed, CAUSES),
        ):
            yield by_label(spec, {label: counts[label] for label in labels})
        yield self._program_seconds.metric()
        yield self._program_turns.metric()
        pauses = histogram_family(replica.PAUSE_SECONDS)
        for tool, histogram in list(self._pauses.items()):
            histogram.add_to(pauses, [tool])
        yield pauses
