"""Variants of the policy `program` for agents' programs (sequences of requests, or turns). Each
lacks one of its rules or some of the clients' information, and is a class that `--policy
package.module:Class` accepts.
"""

from services.common.pool.ids import ContextId
from services.common.pool.operations import Admission
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.policies.program.order import Turns
from services.scheduler.core.policies.program.pauses import PauseStatistics
from services.scheduler.core.policies.program.policy import ProgramPolicy, ProgramQueue
from services.scheduler.core.policies.program.retention import ProgramRetention
from services.scheduler.core.request import Request


class Changed(ProgramPolicy):
    """The policy `program`, in which subclasses can replace the types of its parts."""

    Retention: type[ProgramRetention] = ProgramRetention
    Counts: type[Turns] = Turns
    Pauses: type[PauseStatistics] = PauseStatistics
    Queue: type[ProgramQueue] = ProgramQueue

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts)
        self.retention = self.Retention(parts)
        self.retention.turns = self.Counts(parts.config)
        self.retention.worth.pauses = self.Pauses()

    def create_request_queue(self) -> ProgramQueue:
        return self.Queue(self)


class RequestOrder(Changed):
    class Retention(ProgramRetention):
        def due(self, request: Request) -> tuple[float, float]:
            return 0.0, request.arrival_time


class ProgramOrder(Changed):
    class Retention(ProgramRetention):
        def due(self, request: Request) -> tuple[float, float]:
            return 0.0, super().due(request)[1]


class NoCachedFirst(Changed):
    class Queue(ProgramQueue):
        def _rank(self, request: Request) -> tuple[int, int, float, float, int]:
            return request.priority, 0, *self._policy.retention.due(request), request.key


class OldestPauses(Changed):
    class Pauses(PauseStatistics):
        def index(self, tenant: bytes, tool: str, age: float) -> float:  # noqa: ARG002
            return 1 / (age + 1)


class NoWorth(Changed):
    class Retention(ProgramRetention):
        def limit(self, terms: Admission, request: Request, num_running: int) -> None:
            super().limit(terms, request, num_running)
            terms.num_retained_blocks = None


class NoHeadroom(Changed):
    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts)
        self.retention._headroom = 0


class NoAging(Changed):
    class Counts(Turns):
        oldest_comes_first = False


class NoBound(Changed):
    class Counts(Turns):
        cold_comes_first = False


class NoTools(Changed):
    class Retention(ProgramRetention):
        def end_turn(self, context_id: ContextId, tool: str, *, ends: bool) -> None:  # noqa: ARG002
            super().end_turn(context_id, "call", ends=ends)


class NoEnds(Changed):
    """Clients mark no last turn of a program. Only the missing name of a tool shows it."""

    class Retention(ProgramRetention):
        def end_turn(self, context_id: ContextId, tool: str, *, ends: bool) -> None:  # noqa: ARG002
            super().end_turn(context_id, tool, ends=False)


class Vanishing(Changed):
    """In three of ten programs, the last turn names a tool, as if a further turn would follow."""

    class Retention(ProgramRetention):
        _tool = ""

        def end_turn(self, context_id: ContextId, tool: str, *, ends: bool) -> None:
            self._tool = tool or self._tool
            vanishes = ends and context_id % 10 < 3
            super().end_turn(
                context_id, self._tool if vanishes else tool, ends=ends and not vanishes
            )


class Anonymous(Changed):
    class Retention(ProgramRetention):
        def end_turn(self, context_id: ContextId, tool: str, *, ends: bool) -> None:
            """Ignores the end of a turn, as if the client had not reported it."""


BY_ARRIVAL = "programs by arrival"
RULES: dict[str, type[Changed]] = {
    "requests by arrival": RequestOrder,
    BY_ARRIVAL: ProgramOrder,
    "cached not first": NoCachedFirst,
    "oldest pause taken first": OldestPauses,
    "no admission by worth": NoWorth,
    "no headroom": NoHeadroom,
    "no aging": NoAging,
    "no bound of 32": NoBound,
    "no names of tools": NoTools,
    "no last turns": NoEnds,
    "3 in 10 vanish": Vanishing,
    "nothing said": Anonymous,
}
