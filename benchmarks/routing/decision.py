"""Times the cache-aware policy's choice of a replica for a prompt of 8192 tokens."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common.figures import percentile
from benchmarks.directory.chains import CHAIN_BLOCKS, make_chains
from services.common.errors import StepwellError
from services.common.pool.block_hash import hash_full_blocks
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import KeyBatch, block_keys
from services.common.replica.load import ReplicaLoad
from services.common.request.sampling import SamplingParams
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription, ReplicaState
from services.gateway.core.fleet.routing.cache_aware import CacheAware
from services.gateway.core.fleet.routing.policy import RoutingParts
from services.gateway.core.ports import Timer
from services.gateway.core.prefix_index.node_view import DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.gateway.core.request.inflight import Inflight, Mailbox
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason
from services.gateway.core.traces.sequence_trace import ResubmitCause

BLOCK_SIZE = 16
PROMPT_TOKENS = CHAIN_BLOCKS * BLOCK_SIZE
TURN_TOKENS = 128
RUNNING_EACH = 8
"""Number of running requests at each replica."""
SECONDS_APART = 0.01
"""Seconds by which the policy's clock advances before each decision."""
_VOCAB_SIZE = 32_000
_FINGERPRINT = bytes(32)
_GROUPS = (KVCacheGroup(AttentionType.FULL, BLOCK_SIZE),)
_LIMITS = ModelLimits(
    2 * PROMPT_TOKENS,
    2 * PROMPT_TOKENS,
    _VOCAB_SIZE,
    (0,),
    priority_scheduling=False,
    hidden_size=1,
)


@dataclass(frozen=True, slots=True)
class DecisionFigures:
    """Durations of one kind of decision, in milliseconds."""

    kind: str
    num_replicas: int
    num_blocks: int
    median_millis: float
    p99_millis: float


def measure_decisions(
    num_replicas: int, num_blocks: int, num_decisions: int
) -> list[DecisionFigures]:
    """Times decisions of each kind, with an index of `num_blocks` blocks on `num_replicas`
    replicas.

    * keys known: the keys of the prompt's blocks are passed in. Each decision is for another prompt
      whose blocks are in the index.
    * next turn: the prompt extends an earlier prompt by 128 tokens. The tokens are packed, the
      hashes of the earlier prompt are looked up, and only the new tokens are hashed.
    * new: the prompt is unknown, and all of it is hashed.
    """
    rng = random.Random(num_replicas)
    turns = [_tokens(rng, PROMPT_TOKENS) for _ in range(num_decisions)]
    world = _World(num_replicas)
    chains = world.fill(num_blocks, turns)
    policy, candidates = world.policy, world.replicas
    asked = world.inflight(turns[0])
    known = [
        world.timed(lambda keys=keys: policy.choose_for_keys(asked, candidates, keys))  # type: ignore[misc]
        for keys in rng.sample(chains, min(num_decisions, len(chains)))
    ]
    follow_ups = []
    for tokens in turns:
        begun = world.inflight(tokens[: PROMPT_TOKENS - TURN_TOKENS])
        policy.choose(begun, candidates)
        follow_up = world.inflight(tokens)
        follow_ups.append(world.timed(lambda ask=follow_up: policy.choose(ask, candidates)))  # type: ignore[misc]
    new = [
        world.timed(lambda ask=ask: policy.choose(ask, candidates))  # type: ignore[misc]
        for ask in (world.inflight(_tokens(rng, PROMPT_TOKENS)) for _ in range(num_decisions))
    ]
    return [
        DecisionFigures(
            kind,
            num_replicas,
            world.index.num_keys,
            1000 * statistics.median(seconds),
            1000 * percentile(seconds, 99),
        )
        for kind, seconds in (("keys known", known), ("next turn", follow_ups), ("new", new))
    ]


class _World:
    """Replicas with running requests, an index of their cached blocks, and a routing policy."""

    def __init__(self, num_replicas: int) -> None:
        self.index = PrefixIndex()
        self.index.contact = DirectoryState.EXACT
        self._now = 0.0
        self._numbers = iter(range(2**62))
        self.policy = CacheAware(RoutingParts(random.Random(0), self, self.index, 16))
        self.replicas = [self._replica(f"node-{number}") for number in range(num_replicas)]

    def time(self) -> float:
        return self._now

    def call_at(self, _when: float, _callback: Callable[[], object], /) -> Timer:
        raise NotImplementedError

    def inflight(self, tokens: list[int]) -> Inflight:
        request = EngineRequest("benchmark", tokens, SamplingParams(max_tokens=128), 0, "", 0)
        (inflight,) = Mailbox(
            [request], self._numbers, lambda _: None, time.perf_counter_ns
        ).inflights
        return inflight

    def fill(self, num_blocks: int, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Adds about `num_blocks` blocks to the index: first the blocks of `prompts` without their
        last turns, each prompt on one replica, then generated chains of blocks. One replica has all
        blocks of a chain, and others may have its first blocks. Returns the block keys of the
        chains.
        """
        held: list[list[Sequence[int]]] = [[] for _ in self.replicas]
        for number, tokens in enumerate(prompts):
            hashes = hash_full_blocks(_FINGERPRINT, tokens[:-TURN_TOKENS], BLOCK_SIZE)
            held[number % len(held)].append(block_keys(hashes))
            num_blocks -= len(hashes)
        chains = []
        for chain in make_chains(max(num_blocks, CHAIN_BLOCKS)):
            chains.append(list(chain.keys))
            for node, depth in chain.depths.items():
                held[node % len(held)].append(chain.keys[:depth])
        for number, (replica, added) in enumerate(zip(self.replicas, held, strict=True)):
            self.index.begin(replica.address, number + 1, _GROUPS)
            keys = [key for part in added for key in part]
            self.index.apply(KeyBatch(number + 1, 1, added=keys))
        return chains

    def timed(self, decide: Callable[[], RoutingDecision]) -> float:
        """Advances the policy's clock, then makes a decision. Returns its duration in seconds."""
        self._now += SECONDS_APART
        began = time.perf_counter()
        decide()
        return time.perf_counter() - began

    def _replica(self, name: str) -> Replica:
        replica = Replica(name, _Link(), self, _Listener())
        replica.opened(ReplicaDescription("m", _LIMITS, _FINGERPRINT, b"", BLOCK_SIZE, name))
        replica.state_changed(ReplicaState(ready=True))
        for _ in range(RUNNING_EACH):
            replica.send(
                self.inflight([1] * BLOCK_SIZE), RoutingDecision(name, RoutingReason.TURN, 1)
            )
        replica.load_changed(ReplicaLoad(RUNNING_EACH, RUNNING_EACH * BLOCK_SIZE, 1e-4, 1e-4))
        return replica


class _Link:
    """A Link of the gateway's core that is not connected to a scheduler."""

    def add(self, handle: int, inflight: Inflight) -> None: ...

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None: ...

    def abort(self, handle: int, *, was_stopped: bool = False) -> None: ...

    def end_turn(self, handle: int, tool: str) -> None: ...


class _Listener:
    """A ReplicaListener of the gateway's core that ignores all events."""

    def replica_changed(self, replica: Replica) -> None: ...

    def replica_lost(self, inflights: list[Inflight], cause: ResubmitCause) -> None: ...

    def request_rejected(
        self, inflight: Inflight, error: StepwellError, replica: Replica
    ) -> None: ...

    def sequence_started(self, inflight: Inflight) -> None: ...

    def sequence_left(self, inflight: Inflight) -> None: ...

    def load_reported(self, replica: Replica) -> None: ...


def _tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(range(_VOCAB_SIZE), k=num_tokens)
