"""The gateway's fleet of replicas, with fake connections and a clock that the test advances."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.request.sampling import SamplingParams
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.fleet.fleet import Fleet
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription, ReplicaState
from services.gateway.core.fleet.routing import make_policy
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.request.delivery import received
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.inflight import Inflight, Mailbox
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import EngineRequest

LIMITS = ModelLimits(100, 90, 320, (0,), priority_scheduling=False, hidden_size=4)
RESUBMIT_TIMEOUT_SECONDS, MIGRATE_AFTER_SECONDS = 30.0, 1.0
BLOCK_SIZE = 4
MAX_LOAD_DELTA = 4


@dataclass(eq=False)
class FakeTimer:
    """A call that ManualClock makes at a given time."""

    when: float
    callback: Callable[[], object]
    timers: "list[FakeTimer]"

    def cancel(self) -> None:
        if self in self.timers:
            self.timers.remove(self)


class ManualClock:
    """The port Clock, whose time the test advances."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[FakeTimer] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object], /) -> FakeTimer:
        timer = FakeTimer(when, callback, self._timers)
        self._timers.append(timer)
        return timer

    def next_call(self) -> None:
        """Advances the time to the next scheduled call, and makes this call."""
        first = min(self._timers, key=lambda timer: timer.when)
        self._timers.remove(first)
        self._now = max(self._now, first.when)
        first.callback()

    def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while due := [timer for timer in self._timers if timer.when <= end]:
            first = min(due, key=lambda timer: timer.when)
            self._timers.remove(first)
            self._now = max(self._now, first.when)
            first.callback()
        self._now = end


@dataclass
class FakeLink:
    """The port Link to a scheduler. It records the messages that the fleet sends."""

    added: dict[int, Inflight] = field(default_factory=dict)
    aborted: list[int] = field(default_factory=list)
    tools: dict[int, str] = field(default_factory=dict)
    chunks: list[tuple[int, Inflight, int]] = field(default_factory=list)

    def add(self, handle: int, inflight: Inflight) -> None:
        self.added[handle] = inflight

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None:
        self.chunks.append((handle, inflight, num_tokens))

    def abort(self, handle: int, *, was_stopped: bool = False) -> None:  # noqa: ARG002
        self.aborted.append(handle)

    def end_turn(self, handle: int, tool: str) -> None:
        self.tools[handle] = tool


class FakeFleet:
    """A fleet of replicas named "a", "b" and so on. At first none is connected."""

    def __init__(
        self,
        num_replicas: int = 2,
        policy: str = "least-loaded",
        max_load_delta: int = MAX_LOAD_DELTA,
        max_num_queued_tokens: int | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.directory: dict[str, int] = {}
        """Maps a node to the number of leading blocks that it has cached, for every prompt."""
        parts = RoutingParts(random.Random(0), self.clock, self, max_load_delta)
        self.links: dict[str, FakeLink] = {}
        self.opened: list[str] = []
        """The addresses of the links that are open."""
        self.fleet = Fleet(
            self,
            self.clock,
            make_policy(policy, parts),
            resubmit_timeout_seconds=RESUBMIT_TIMEOUT_SECONDS,
            migrate_after_seconds=MIGRATE_AFTER_SECONDS,
            tokenizer_fingerprint=b"",
            nanos=lambda: int(1e9 * self.clock.time()),
            max_num_queued_tokens=max_num_queued_tokens,
        )
        self.fleet.set_addresses("test", "abcdefgh"[:num_replicas])

    @property
    def replicas(self) -> dict[str, Replica]:
        return {replica.address: replica for replica in self.fleet.membership.replicas}

    # Methods of the ports Links and PrefixDirectory.

    def make(self, address: str) -> FakeLink:
        link = self.links[address] = FakeLink()
        return link

    def open(self, replica: Replica) -> None:
        self.opened.append(replica.address)

    def close(self, replica: Replica) -> None:
        self.opened.remove(replica.address)

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        return {node: min(depth, len(keys)) for node, depth in self.directory.items()}

    def connect(
        self,
        *names: str,
        fingerprint: bytes = b"f",
        limits: ModelLimits = LIMITS,
        max_num_seqs: int = 0,
        retains_contexts: bool = False,
    ) -> None:
        """Opens sessions (streams) with schedulers of replicas, which report to be ready."""
        for name in names:
            replica = self.replicas[name]
            description = ReplicaDescription(
                "tiny",
                limits,
                fingerprint,
                b"",
                BLOCK_SIZE,
                name,
                max_num_seqs=max_num_seqs,
                retains_contexts=retains_contexts,
            )
            replica.opened(description)
            replica.state_changed(ReplicaState(ready=True))

    def start(
        self,
        *,
        max_tokens: int = 8,
        num_prompts: int = 1,
        n: int = 1,
        deadline: float | None = None,
        prompt: Sequence[int] = (1, 2),
        session_id: str = "",
        caller: Caller = ANYONE,
        priority: int = 0,
    ) -> Mailbox:
        """Starts a request for `n` answers to each prompt. The prompts have a common prefix."""
        sampling = SamplingParams(max_tokens=max_tokens)
        requests = [
            EngineRequest(
                "r",
                tokens,
                sampling,
                priority,
                "",
                0,
                deadline=deadline,
                session_id=session_id,
                caller=caller,
            )
            for tokens in ([*prompt, number] for number in range(num_prompts))
            for _ in range(n)
        ]
        return self.fleet.start(requests)

    def has(self, name: str) -> list[Inflight]:
        """The sequences that run at a replica."""
        return list(self.replicas[name].running.values())

    def handle(self, replica: Replica, inflight: Inflight) -> int:
        (handle,) = (handle for handle, one in replica.running.items() if one is inflight)
        return handle


async def only_delta(mailbox: Mailbox) -> Delta:
    """The delta that arrived in a mailbox. The request must have a single sequence."""
    [(index, delta)] = await received(mailbox)
    assert index == 0
    return delta


async def error_of(mailbox: Mailbox) -> StepwellError:
    error = (await only_delta(mailbox)).error
    assert error is not None
    return error
