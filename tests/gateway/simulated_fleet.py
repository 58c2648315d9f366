"""Measures a routing policy without noise, in simulated time and with replicas that compute
nothing.

The fleet and the policy are the gateway's own. A simulated replica has a prefix cache with LRU
eviction. Its steps take a time for each prompt token and for each decoding request. A closed loop
sends the conversations of `benchmarks.routing`.
"""

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.common.figures import percentile
from benchmarks.routing.conversations import Conversation, OpenConversations, Workload
from services.common.replica.load import ReplicaLoad
from services.common.request.finish import Finish, FinishReason
from services.common.request.sampling import SamplingParams
from services.gateway.core.fleet.fleet import Fleet
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription, ReplicaState
from services.gateway.core.fleet.routing import make_policy
from services.gateway.core.fleet.routing.chain_keys import ChainKeys
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import EngineRequest

BLOCK_SIZE = 16
STEP_SECONDS, PROMPT_TOKEN_SECONDS, DECODE_SECONDS = 3e-3, 1.5e-4, 5e-4
STEP_TOKENS = 512
REPORT_SECONDS, EVENT_SECONDS = 0.1, 0.01
_LIMITS = ModelLimits(2**20, 2**20, 2**20, (0,), priority_scheduling=False, hidden_size=1)
_ROOT = bytes(32)


class SimulatedClock:
    """The port Clock in simulated time, which `run` advances."""

    def __init__(self) -> None:
        self._now = 0.0
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object], /) -> "SimulatedClock":
        heapq.heappush(self._calls, (when, next(self._numbers), callback))
        return self

    def cancel(self) -> None: ...

    def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            when, _, callback = heapq.heappop(self._calls)
            self._now = max(self._now, when)
            callback()


@dataclass(slots=True, eq=False)
class _Sequence:
    handle: int
    inflight: Inflight
    keys: list[int]
    num_left: int = 0
    """The number of prompt tokens that no step has computed yet."""
    held: list[int] = field(default_factory=list)


class SimulatedReplica:
    """A scheduler with its pool and worker, behind the port Link of the gateway's fleet."""

    def __init__(self, clock: SimulatedClock, num_blocks: int, slowness: float = 1.0) -> None:
        """`slowness` is the time of a token that the replica reports, divided by the real time."""
        self.replica: Replica
        self.published: set[int] = set()
        """The keys under which the directory has blocks of this replica."""
        self.on_finished: Callable[[Inflight], None] = lambda _: None
        self._clock = clock
        self._slowness = slowness
        self._num_free = num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that no sequence uses, in eviction order."""
        self._ref_counts: dict[int, int] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._keys = ChainKeys()
        self._is_in_step = False
        self._reported_at = -REPORT_SECONDS
        self._draw = random.Random(7)

    def add(self, handle: int, inflight: Inflight) -> None:
        request = inflight.request
        keys = self._chain(request, request.prompt_token_ids)
        self._waiting.append(_Sequence(handle, inflight, keys))
        if not self._is_in_step:
            self._is_in_step = True
            self._clock.call_at(self._clock.time(), self._begin_step)

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None:  # noqa: ARG002
        raise AssertionError("no session is simulated")

    def abort(self, handle: int, *, was_stopped: bool = False) -> None: ...

    def end_turn(self, handle: int, tool: str) -> None: ...

    def cached_depth(self, keys: Sequence[int]) -> int:
        for depth, key in enumerate(keys):
            if key not in self._ref_counts and key not in self._idle:
                return depth
        return len(keys)

    def _chain(self, request: EngineRequest, tokens: list[int]) -> list[int]:
        return self._keys.of(_ROOT, tokens, BLOCK_SIZE, request.cache_salt)

    def _begin_step(self) -> None:
        decoding = [sequence for sequence in self._running if not sequence.num_left]
        budget = STEP_TOKENS - len(decoding)
        num_prompt_tokens = 0
        for sequence in self._running:
            num_prompt_tokens += self._compute(sequence, budget - num_prompt_tokens)
        while self._waiting and num_prompt_tokens < budget and self._admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            num_prompt_tokens += self._compute(sequence, budget - num_prompt_tokens)
        ready = [sequence for sequence in self._running if not sequence.num_left]
        seconds = STEP_SECONDS + PROMPT_TOKEN_SECONDS * num_prompt_tokens
        seconds += DECODE_SECONDS * len(decoding)
        self._clock.call_at(self._clock.time() + seconds, partial(self._end_step, ready))

    @staticmethod
    def _compute(sequence: _Sequence, most: int) -> int:
        num_tokens = min(sequence.num_left, most)
        sequence.num_left -= num_tokens
        return num_tokens

    def _admit(self, sequence: _Sequence) -> bool:
        """Allocates all blocks of a sequence. Returns False if too few blocks are free."""
        request = sequence.inflight.request
        num_prompt, keys = len(request.prompt_token_ids), sequence.keys
        depth = min(self.cached_depth(keys), (num_prompt - 1) // BLOCK_SIZE)
        num_blocks = -(-(num_prompt + (request.sampling.max_tokens or 0)) // BLOCK_SIZE)
        num_new = num_blocks - depth
        if num_new > self._num_free + len(self._idle) - sum(key in self._idle for key in keys):
            return False
        for key in keys[:depth]:
            self._hold(key, sequence)
        while self._num_free < num_new:
            evicted, _ = self._idle.popitem(last=False)
            self._later(partial(self.published.discard, evicted))
            self._num_free += 1
        self._num_free -= num_new
        sequence.num_left = num_prompt - depth * BLOCK_SIZE
        self.replica.admitted(sequence.handle, depth * BLOCK_SIZE)
        return True

    def _hold(self, key: int, sequence: _Sequence) -> None:
        self._idle.pop(key, None)
        self._ref_counts[key] = self._ref_counts.get(key, 0) + 1
        sequence.held.append(key)

    def _publish(self, keys: Sequence[int], sequence: _Sequence) -> None:
        """Caches a sequence's full blocks by their keys. Frees blocks of keys cached before."""
        for key in keys:
            if key in self._ref_counts or key in self._idle:
                self._num_free += 1
            self._hold(key, sequence)
        self._later(partial(self.published.update, keys))

    def _later(self, change: Callable[[], object]) -> None:
        """Applies a change to the directory after EVENT_SECONDS."""
        self._clock.call_at(self._clock.time() + EVENT_SECONDS, change)

    def _end_step(self, ready: Sequence[_Sequence]) -> None:
        for sequence in ready:
            inflight, request = sequence.inflight, sequence.inflight.request
            if not inflight.output_token_ids:
                self._publish(sequence.keys[len(sequence.held) :], sequence)
            inflight.tokens([self._draw.randrange(2**20)])
            if len(inflight.output_token_ids) == request.sampling.max_tokens:
                self._end(sequence)
        now = self._clock.time()
        if now >= self._reported_at + REPORT_SECONDS:
            self._reported_at = now
            unfinished = [*self._running, *self._waiting]
            num_tokens = sum(sequence.num_left for sequence in self._running)
            num_tokens += sum(len(s.inflight.request.prompt_token_ids) for s in self._waiting)
            speeds = (self._slowness * PROMPT_TOKEN_SECONDS, self._slowness * DECODE_SECONDS)
            self.replica.load_changed(ReplicaLoad(len(unfinished), num_tokens, *speeds))
        if self._running or self._waiting:
            self._begin_step()
        else:
            self._is_in_step = False

    def _end(self, sequence: _Sequence) -> None:
        inflight, request = sequence.inflight, sequence.inflight.request
        num_tokens = len(request.prompt_token_ids) + len(inflight.output_token_ids)
        # The last token, which no step has computed.
        tokens = [*request.prompt_token_ids, *inflight.output_token_ids][:-1]
        self._publish(self._chain(request, tokens)[len(sequence.held) :], sequence)
        self._num_free += -(-num_tokens // BLOCK_SIZE) - len(sequence.held)
        for key in reversed(sequence.held):
            self._ref_counts[key] -= 1
            if not self._ref_counts[key]:
                del self._ref_counts[key]
                self._idle[key] = None
        self._running.remove(sequence)
        self.replica.finished(sequence.handle, Finish(FinishReason.LENGTH))
        self.on_finished(inflight)


@dataclass(slots=True)
class SimulatedFigures:
    """The figures measured for a policy. Times are in seconds."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    num_sent_tokens: int = 0
    num_best_tokens: int = 0
    """The sum over all requests of the longest prefix, in tokens, that any replica had cached."""
    num_requests: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def best_hit_rate(self) -> float:
        """The hit rate if each request ran at the replica with its longest cached prefix."""
        return self.num_best_tokens / self.num_sent_tokens

    @property
    def ttft_p99(self) -> float:
        return percentile(self.first_token_seconds, 99)

    @property
    def spread(self) -> float:
        """The largest number of requests that a replica got, divided by the mean number."""
        counts = self.num_requests.values()
        return max(counts) * len(counts) / sum(counts)


class SimulatedFleet:
    """A fleet of simulated replicas, and the directory of their cached blocks."""

    def __init__(
        self,
        policy: str,
        num_replicas: int,
        num_blocks: int,
        max_load_delta: int = 16,
        measured_slowness: Sequence[float] = (),
    ) -> None:
        """`measured_slowness` has the `slowness` of each replica, by default 1."""
        self.clock = SimulatedClock()
        self.links: dict[str, SimulatedReplica] = {}
        self._num_blocks = num_blocks
        self._measured_slowness = measured_slowness or (1.0,) * num_replicas
        parts = RoutingParts(random.Random(0), self.clock, self, max_load_delta)
        self.fleet = Fleet(
            self,
            self.clock,
            make_policy(policy, parts),
            resubmit_timeout_seconds=30.0,
            migrate_after_seconds=1.0,
            tokenizer_fingerprint=b"",
            nanos=lambda: int(1e9 * self.clock.time()),
        )
        self.fleet.set_addresses("test", (f"replica-{number}" for number in range(num_replicas)))

    # Methods of the ports Links and PrefixDirectory.

    def make(self, address: str) -> SimulatedReplica:
        slowness = self._measured_slowness[len(self.links)]
        link = self.links[address] = SimulatedReplica(self.clock, self._num_blocks, slowness)
        return link

    def open(self, replica: Replica) -> None:
        self.links[replica.address].replica = replica
        name = replica.address
        replica.opened(ReplicaDescription("m", _LIMITS, _ROOT, b"", BLOCK_SIZE, name))
        replica.state_changed(ReplicaState(ready=True))

    def close(self, replica: Replica) -> None: ...

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        found = {}
        for name, link in self.links.items():
            depth = next(
                (at for at, key in enumerate(keys) if key not in link.published), len(keys)
            )
            if depth:
                found[name] = depth
        return found

    def run(self, workload: Workload, at_once: int) -> SimulatedFigures:
        """Sends a workload, with `at_once` open requests. Returns the figures after its warm-up."""
        loop = _ClosedLoop(self, workload, at_once)
        self.clock.run(lambda: loop.num_done >= workload.num_warm_up + workload.num_requests)
        return loop.figures


@dataclass(slots=True)
class _Turn:
    conversation: Conversation
    sent_at: float
    is_measured: bool
    has_token: bool = False


class _ClosedLoop:
    """Sends the next turn of a conversation whenever an answer has ended."""

    def __init__(self, world: SimulatedFleet, workload: Workload, at_once: int) -> None:
        self.figures = SimulatedFigures()
        self.num_done = 0
        self._world = world
        self._workload = workload
        self._conversations = OpenConversations(workload, at_once)
        self._turns: dict[Inflight, _Turn] = {}
        self._chain_keys = ChainKeys()
        for link in world.links.values():
            link.on_finished = self._finished
        for _ in range(at_once):
            self._send()
        self._watch()

    def _watch(self) -> None:
        """Records the times of first tokens, to the millisecond."""
        now = self._world.clock.time()
        for inflight, turn in self._turns.items():
            if inflight.output_token_ids and not turn.has_token:
                self._first_token(turn, now)
        self._world.clock.call_at(now + 1e-3, self._watch)

    def _first_token(self, turn: _Turn, now: float) -> None:
        turn.has_token = True
        if turn.is_measured:
            self.figures.first_token_seconds.append(now - turn.sent_at)

    def _send(self) -> None:
        conversation = self._conversations.take()
        tokens = list(conversation.token_ids)
        sampling = SamplingParams(max_tokens=self._workload.answer_tokens)
        request = EngineRequest("r", tokens, sampling, 0, "", 0)
        keys = self._chain_keys.of(_ROOT, tokens, BLOCK_SIZE, "")
        best = max(link.cached_depth(keys) for link in self._world.links.values())
        is_measured = self.num_done >= self._workload.num_warm_up
        (inflight,) = self._world.fleet.start([request]).inflights
        self._turns[inflight] = _Turn(conversation, self._world.clock.time(), is_measured)
        if is_measured:
            figures, (route,) = self.figures, inflight.mailbox.routes
            figures.num_sent_tokens += len(tokens)
            figures.num_best_tokens += best * BLOCK_SIZE
            reason, name = route.reason.value, route.address
            figures.reasons[reason] = figures.reasons.get(reason, 0) + 1
            figures.num_requests[name] = figures.num_requests.get(name, 0) + 1

    def _finished(self, inflight: Inflight) -> None:
        turn, now = self._turns.pop(inflight), self._world.clock.time()
        if not turn.has_token:
            self._first_token(turn, now)
        if turn.is_measured:
            num_cached = inflight.mailbox.delta(0).num_cached_tokens
            self.figures.num_cached_tokens += num_cached or 0
            self.figures.num_prompt_tokens += len(inflight.request.prompt_token_ids)
        self.num_done += 1
        self._conversations.answered(turn.conversation, inflight.output_token_ids)
        self._world.clock.call_at(now, self._send)
