"""A fleet of simulated replicas behind a gateway's real routing core."""

import random
from collections.abc import Callable, Sequence
from functools import partial

from services.common.pool.kv_directory import KeyBatch, block_keys
from services.common.replica.load import ReplicaLoad
from services.gateway.core.fleet.fleet import Fleet
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription, ReplicaState
from services.gateway.core.fleet.routing import make_policy
from services.gateway.core.fleet.routing.policy import RoutingParts, SequenceKeys
from services.gateway.core.prefix_index.node_view import DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.gateway.core.request.model_limits import ModelLimits
from services.kvpool.core.events import AllBlocksCleared, BlocksStored, Event
from services.scheduler.core.config import SchedulerConfig
from services.simulation.laboratory.clock import EventClock
from services.simulation.laboratory.device import Device
from services.simulation.laboratory.replica import SimulatedReplica

MAX_LOAD_DELTA = 16
"""The default of the gateway's setting `max_load_delta`."""


class Directory:
    """Replaces the gateway's directory of cached prefixes. It is always up to date. It does nothing
    before the first look-up, so that it costs no time with a routing policy that does not use it.
    """

    def __init__(self, replicas: dict[str, SimulatedReplica]) -> None:
        self._index = PrefixIndex()
        self._replicas = replicas
        self._sequences: dict[str, int] = {}
        for epoch, (name, replica) in enumerate(replicas.items()):
            replica.on_pool_changed = partial(self._follow, name, epoch, replica)
        self._has_begun = False

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Returns the hit length in each replica. A replica with a hit first applies the steps that
        it has skipped, because they may have evicted hit blocks. Other replicas need not, because
        blocks that skipped steps add are in no other prompt.
        """
        if not self._has_begun:
            self._begin()
        nodes = self._index.match(keys)
        has_changed = [self._replicas[node].catch_up() for node in nodes]
        return self._index.match(keys) if any(has_changed) else nodes

    def _begin(self) -> None:
        self._has_begun = True
        self._index.contact = DirectoryState.EXACT
        for epoch, (name, replica) in enumerate(self._replicas.items()):
            self._index.begin(name, epoch, replica.scheduler.config.all_groups)
            self._sequences[name] = 0
            replica.pool.core.take_events()
            self._apply(name, epoch, replica.pool.core.snapshot())

    def _follow(self, name: str, epoch: int, replica: SimulatedReplica) -> None:
        events = replica.pool.core.take_events()
        if events and self._has_begun:
            self._apply(name, epoch, events)

    def _apply(self, name: str, epoch: int, events: Sequence[Event]) -> None:
        for event in events:
            assert not isinstance(event, AllBlocksCleared)
            keys = block_keys(event.hashes, event.group)
            number = self._sequences[name] = self._sequences[name] + 1
            is_stored = isinstance(event, BlocksStored)
            added, removed = (keys, ()) if is_stored else ((), keys)
            self._index.apply(KeyBatch(epoch, number, added, removed))


class SimulatedFleet:
    """A gateway's fleet of simulated replicas. Implements `Links` of the gateway's core."""

    def __init__(
        self,
        clock: EventClock,
        routing: str,
        num_replicas: int,
        make_replica: Callable[[], SimulatedReplica],
        config: SchedulerConfig,
        device: Device,
        sequence_keys: SequenceKeys,
        seed: int,
    ) -> None:
        self.replicas: dict[str, SimulatedReplica] = {
            f"replica-{number}": make_replica() for number in range(num_replicas)
        }
        self._config = config
        self._load = ReplicaLoad(
            0,
            0,
            device.seconds_per_prompt_token(config.token_budget),
            device.seconds_per_decode(config.max_num_seqs),
        )
        directory = Directory(self.replicas)
        rng = random.Random(seed)
        parts = RoutingParts(rng, clock, directory, MAX_LOAD_DELTA, sequence_keys)
        self.fleet = Fleet(
            self,
            clock,
            make_policy(routing, parts),
            resubmit_timeout_seconds=30.0,
            migrate_after_seconds=1.0,
            tokenizer_fingerprint=b"",
            nanos=clock.nanos,
        )
        self.fleet.set_addresses("laboratory", self.replicas)

    def make(self, address: str) -> SimulatedReplica:
        return self.replicas[address]

    def open(self, replica: Replica) -> None:
        config = self._config
        self.replicas[replica.address].replica = replica
        length = config.max_model_len
        limits = ModelLimits(
            length, length, 2**31 - 1, (), priority_scheduling=False, hidden_size=1
        )
        name = replica.address
        description = ReplicaDescription(
            "simulated",
            limits,
            config.fingerprint,
            b"",
            config.block_size,
            name,
            max_num_seqs=config.max_num_seqs,
        )
        replica.opened(description)
        replica.state_changed(ReplicaState(ready=True))
        replica.load_changed(self._load)

    def close(self, replica: Replica) -> None:  # noqa: ARG002
        raise AssertionError("replicas of the laboratory never leave")
