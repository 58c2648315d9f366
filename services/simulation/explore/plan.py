"""Draws a run from its seed."""

import random
import re
from dataclasses import dataclass, replace
from typing import Any

from services.scheduler.core.policies import POLICIES, holds_ended, retains_contexts
from services.simulation.explore.faults import Fault, Kind, draw_faults
from services.simulation.explore.members import REDIS, Shape, links, service_names
from services.simulation.explore.requests import FOCI, Arrival, draw_arrivals

_LOAD_SECONDS = 0.3, 1.0, 1.0, 20.0
"""The time in which requests arrive and faults begin. A long time has pauses."""
_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("async_scheduling", False),
    ("long_prefill_token_threshold", 16),
    ("max_num_active_seqs", 2),
    ("max_num_sessions", 1),
    ("max_num_waiting", 3),
    ("prefill_schedule_interval", 3),
    ("scheduler_reserve_full_isl", False),
    ("watermark", 0.2),
    ("watermark", 0.8),
)
"""Settings of schedulers that may replace the defaults."""
_CHANGED = 0.1
"""The chance of each of them."""
_FAILURES_OF_ONE = 3
"""The number of failed steps in a row after which a request is given up."""
_FOCUS = 0.75
"""The chance that a run has much of one thing."""
_BUSY = 0.2
"""The chance that all services are busy."""
_REPLICA_0 = re.compile(r"(pool|worker|scheduler)-0")
_SHARED = ("gateway", REDIS)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that is not drawn while it runs."""

    seed: int
    shape: Shape
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    is_busy: bool = False
    """Whether all services are interrupted again and again, which is no fault."""

    def excuses(self, arrival: Arrival) -> bool:
        """Whether a client may get only the beginning of its answer: it leaves, or its gateway has
        ended. A client with an idempotency key asks again.
        """
        request = arrival.request
        if arrival.leaves_after_seconds is not None or request.breaks_after_seconds is not None:
            return True
        gateway = f"gateway-{arrival.gateway}"
        return not request.key and any(fault.ends_calls_of(gateway) for fault in self.faults)

    @property
    def may_give_up(self) -> bool:
        """Whether so many steps may fail that a request is given up as their cause."""
        is_reset = any(fault.kind is Kind.RESET for fault in self.faults)
        return is_reset or sum(one.rule.count(":") for one in self.faults) >= _FAILURES_OF_ONE

    @property
    def spares_a_replica(self) -> bool:
        """Whether the faults leave all of a replica alone, and the gateways and Redis."""
        hit = set()
        for fault in self.faults:
            names = [name for name in (fault.service, fault.peer) if name is not None]
            replicas = {one.split("-")[1] for one in names if not one.startswith(_SHARED)}
            if not replicas:
                return False
            hit |= replicas
        return len(hit) < self.shape.num_replicas


def make_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    shape = _draw_shape(rng)
    count, seconds = rng.randrange(4, 16), rng.choice(_LOAD_SECONDS)
    focus = rng.choice(FOCI) if rng.random() < _FOCUS else None
    arrivals = draw_arrivals(
        rng, count, seconds, shape.num_gateways, pools=shape.pools, focus=focus
    )
    services, pairs, num_faults = service_names(shape), links(shape), rng.choice((0, 1, 2, 3, 5))
    if shape.num_replicas > 1 and rng.random() < 0.6:  # the other replica takes over
        services = [name for name in services if _REPLICA_0.match(name)]
        pairs = [pair for pair in pairs if any(map(_REPLICA_0.match, pair))]
        num_faults = rng.choice((1, 2, 3, 5))
    moments = [arrival.at_seconds for arrival in arrivals]
    faults = draw_faults(rng, services, pairs, num_faults, seconds, moments)
    return Plan(seed, shape, tuple(arrivals), tuple(faults), is_busy=rng.random() < _BUSY)


def _draw_shape(rng: random.Random) -> Shape:
    shape = Shape(
        num_replicas=rng.choice((1, 2)),
        num_gateways=rng.choice((1, 1, 2)),
        num_ranks=2 if rng.random() < 0.15 else 1,
        has_redis=rng.random() < 0.3,
        has_step_log=rng.random() < 0.3,
    )
    if rng.random() < 0.06:
        return replace(shape, pools=True)
    drafts = rng.choice(("", "", "ngram", "draft_model"))
    tier_gib = rng.choice((0.001, 0.003)) if rng.random() < 0.3 else 0.0
    settings = dict(setting for setting in _SETTINGS if rng.random() < _CHANGED)
    if not tier_gib and rng.random() < _CHANGED:  # a tier is found as cached prefixes are
        settings["enable_prefix_caching"] = False
    if rng.random() < 0.4:
        policies = [name for name in POLICIES if retains_contexts(name)]
        policy = rng.choice(("program", *policies))
        if not (tier_gib and holds_ended(policy)):
            settings["policy"] = policy
    return replace(shape, drafts=drafts, tier_gib=tier_gib, settings=tuple(settings.items()))
