"""Runs a workload on a simulated fleet."""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv.capacity import max_request_tokens
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.policies import PROGRAM
from services.scheduler.options.listed import TRANSFERS
from services.simulation.inprocess_pool import InProcessPool
from services.simulation.laboratory.accounts import Accounts
from services.simulation.laboratory.clients import Clients
from services.simulation.laboratory.clock import EventClock
from services.simulation.laboratory.device import Device
from services.simulation.laboratory.fleet import SimulatedFleet
from services.simulation.laboratory.optimum import KnownFuturePool
from services.simulation.laboratory.programs import Program
from services.simulation.laboratory.replica import SimulatedReplica
from services.simulation.laboratory.tier import NO_TIER, TierSize
from services.worker.core.step_times import NO_SERVING, ServingCosts, StepTimes

_FINGERPRINT = bytes(32)
"""The first hash in all chains of block hashes, in the replicas and in the gateway."""

_UNLIMITED = 30
"""Factor for the blocks of a pool that counts as unlimited."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of a simulated fleet."""

    config: SchedulerConfig
    times: StepTimes
    serving: ServingCosts = NO_SERVING
    num_replicas: int = 1
    routing: str = "cache-aware"
    seed: int = 0
    tier: TierSize = NO_TIER
    is_optimum: bool = False
    """Whether cached blocks are evicted with a known future (`optimum`)."""
    tells_work: bool = False
    """Whether a request's priority is the number of tokens that its client has left (SRPT)."""
    watch: Callable[[SimulatedReplica, SchedulerOutput], object] | None = None
    """Called after each planned step. Steps that `may_skip` skips are not planned."""
    may_skip: bool = True
    """Whether consecutive equal steps are computed at once, without planning each of them. The
    results do not change.
    """


def bounds(setup: Setup) -> dict[str, Setup]:
    """Setups that no real scheduler can beat: with unlimited memory, and with knowledge of the work
    that each client has left.
    """
    config = setup.config
    unlimited = replace(config, policy="fcfs", num_blocks=_UNLIMITED * config.num_blocks)
    known = replace(setup, config=replace(config, policy=PROGRAM), tells_work=True)
    return {"unlimited memory": replace(setup, config=unlimited), "known work": known}


@dataclass(slots=True)
class RunResult:
    accounts: Accounts
    num_steps: int
    num_planned_steps: int
    num_preemptions: int
    num_computed_tokens: int
    simulated_seconds: float
    real_seconds: float


def simulate(
    setup: Setup, programs: Iterable[Program], progress: Callable[[], object] = lambda: None
) -> RunResult:
    """Runs all programs to their ends. `progress` is called when a program ends. Raises
    AssertionError if a request or a block is left.
    """
    config = setup.config
    config = replace(
        config,
        max_model_len=max_request_tokens(config),
        fingerprint=_FINGERPRINT,
        kv_role=TRANSFERS.role(setup.tier.num_blocks),
    )
    clock, device = EventClock(), Device(setup.times, setup.serving)
    accounts = Accounts(device, config.token_budget, config.block_size)
    tells_work = setup.tells_work
    clients = Clients(iter(programs), clock, config, accounts, progress, tells_work=tells_work)
    began = time.perf_counter()

    def make_replica() -> SimulatedReplica:
        pool = KnownFuturePool(config) if setup.is_optimum else InProcessPool(config)
        replica = SimulatedReplica(
            config,
            device,
            clock,
            clients,
            clients.take_sent,
            pool,
            TRANSFERS(config, setup.tier.num_blocks).connect,
            setup.tier.seconds_per_block,
            may_skip=setup.may_skip,
        )
        if setup.watch is not None:
            replica.watchers.append(partial(setup.watch, replica))
        if isinstance(pool, KnownFuturePool):
            replica.on_added = partial(clients.note_owners, pool)
        return replica

    fleet = SimulatedFleet(
        clock, setup.routing, setup.num_replicas, make_replica, config, device, clients, setup.seed
    )
    clients.fleet = fleet
    clients.begin()
    gc.freeze()  # The garbage collector then skips the pools.
    clock.run()
    gc.unfreeze()
    replicas = list(fleet.replicas.values())
    for replica in replicas:
        replica.finish()
        check_nothing_left(replica)
    if clients.live or clients.sent:
        raise AssertionError("a program has not ended")
    return RunResult(
        accounts,
        sum(replica.num_steps for replica in replicas),
        sum(replica.num_planned_steps for replica in replicas),
        sum(replica.scheduler.num_preemptions for replica in replicas),
        sum(replica.num_computed_tokens for replica in replicas),
        clock.now,
        time.perf_counter() - began,
    )


def check_nothing_left(replica: SimulatedReplica) -> None:
    """Raises AssertionError if a replica has a request or a block in use after the run."""
    scheduler, pool = replica.scheduler, replica.pool.core
    assert not scheduler.requests, "a request is left"
    assert not replica.replica.running, "a sequence is left at the gateway"
    assert pool.num_free_blocks == scheduler.config.num_blocks - 1, "a block is left"
    pool.check()
