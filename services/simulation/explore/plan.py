"""Draws the plan of a run (a simulation of all services) from its seed."""

import random
import re
from dataclasses import dataclass, replace
from typing import Any

from services.scheduler.core.policies import POLICIES, PROGRAM, holds_ended
from services.simulation.explore.faults import PAUSE_SECONDS, Fault, Kind, draw_faults
from services.simulation.explore.members import (
    NUM_BLOCKS,
    NUM_FEW_BLOCKS,
    REDIS,
    Shape,
    links,
    service_names,
)
from services.simulation.explore.requests import CROWDED_FOCI, FOCI, LEAVING, Arrival, draw_arrivals
from services.simulation.explore.themes import THEMES, Theme

_LOAD_SECONDS = 0.3, 1.0, 1.0, 20.0
"""The durations of a run's load and faults, one of which is drawn. In the longest, the services are
idle between bursts of requests.
"""
_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("async_scheduling", False),
    ("long_prefill_token_threshold", 16),
    ("max_num_active_seqs", 2),
    ("max_num_sessions", 1),
    ("max_num_waiting", 3),
    ("max_num_waiting", 3),
    ("prefill_schedule_interval", 3),
    ("scheduler_reserve_full_isl", False),
    ("watermark", 0.2),
    ("watermark", 0.8),
)
"""Scheduler settings that may replace the defaults."""
_CHANGED = 0.1
"""The probability that a setting is replaced."""
_POLICY_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("aging_interval", 2),
    ("max_num_programs", 2),
    ("max_warm_admissions", 1),
    ("program_idle_seconds", 1.0),
    ("retention_headroom", 0.4),
)
"""Settings of the policy `program`."""
_POLICY_CHANGED = 0.2
"""The probability that a setting of the policy `program` is replaced."""
_FAILURES_OF_ONE = 3
"""The number of successive failed steps after which the scheduler gives up a request."""
_THEME = 0.75
"""The probability that a run has a theme."""
_FOCUS = 0.75
"""The probability that a run has many requests of one kind."""
_LEAVING_WITH_TIER = 0.4
"""The probability that many clients leave in a run with a tier, some while their blocks load."""
_CROWDED, _CROWDED_WITH_TIER = 0.4, 0.7
"""The probability that pools are small, so that requests preempt each other, or load blocks from a
tier if there is one.
"""
_BUSY = 0.2
"""The probability that all services are busy."""
_REPLICA_0 = re.compile(r"(pool|worker|scheduler)-0")
_SHARED = ("gateway", REDIS)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is drawn before a run begins."""

    seed: int
    shape: Shape
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()
    pause_seconds: float = 0.0
    """Limit of the pauses of services that are interrupted again and again. This is not a fault. 0
    if there are none.
    """
    paused: str = ""
    """The beginning of the names of the services with pauses."""

    def excuses(self, arrival: Arrival) -> bool:
        """Whether a client may receive only the beginning of its answer, because it leaves or its
        gateway ends. A client with an idempotency key sends its request again.
        """
        request = arrival.request
        if arrival.leaves_after_seconds is not None or request.breaks_after_seconds is not None:
            return True
        gateway = f"gateway-{arrival.gateway}"
        return not request.key and any(fault.ends_calls_of(gateway) for fault in self.faults)

    @property
    def may_give_up(self) -> bool:
        """Whether so many steps may fail that the scheduler blames and gives up a request."""
        is_reset = any(fault.kind is Kind.RESET for fault in self.faults)
        return is_reset or sum(one.rule.count(":") for one in self.faults) >= _FAILURES_OF_ONE

    @property
    def only_ends_schedulers(self) -> bool:
        """Whether the only faults are ends of schedulers after SIGTERM. They complete requests."""
        return bool(self.faults) and all(
            fault.kind is Kind.TERMINATE and fault.service.startswith("scheduler")
            for fault in self.faults
        )

    @property
    def spares_a_replica(self) -> bool:
        """Whether at least one replica, all gateways and Redis have no faults."""
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
    theme = rng.choice(list(THEMES.values())) if rng.random() < _THEME else Theme()
    shape = _draw_shape(rng, theme)
    count, seconds = rng.randrange(4, 16), rng.choice(theme.load_seconds or _LOAD_SECONDS)
    is_crowded = shape.num_blocks == NUM_FEW_BLOCKS
    has_short_queue = shape.setting("max_num_waiting") is not None
    foci = theme.foci or (CROWDED_FOCI if is_crowded else FOCI)
    focus = rng.choice(foci) if theme.foci or rng.random() < _FOCUS else None
    if shape.tier_gib and rng.random() < _LEAVING_WITH_TIER:
        focus = LEAVING
    arrivals = draw_arrivals(
        rng,
        count,
        seconds,
        shape.num_gateways,
        pools=shape.pools,
        is_crowded=is_crowded,
        comes_at_once=theme.comes_at_once or is_crowded or has_short_queue,
        has_priorities=shape.setting("policy") == "priority",
        focus=focus,
        prompts=theme.prompts,
    )
    moments = [arrival.at_seconds for arrival in arrivals]
    faults = _draw_faults(rng, theme, shape, seconds, moments)
    if seconds := theme.pause_seconds:
        later = (_breaks_later(arrival, seconds / 2) for arrival in arrivals)
        return Plan(seed, shape, tuple(later), tuple(faults), seconds, "gateway")
    seconds = PAUSE_SECONDS if rng.random() < _BUSY else 0.0
    return Plan(seed, shape, tuple(arrivals), tuple(faults), seconds)


def _breaks_later(arrival: Arrival, seconds: float) -> Arrival:
    """Delays the moment at which a client leaves in a turn, because pauses delay the turn's end."""
    request = arrival.request
    if request.breaks_after_seconds is None:
        return arrival
    breaks = request.breaks_after_seconds + seconds
    return replace(arrival, request=replace(request, breaks_after_seconds=breaks))


def _draw_faults(
    rng: random.Random, theme: Theme, shape: Shape, seconds: float, moments: list[float]
) -> list[Fault]:
    services, pairs, num_faults = service_names(shape), links(shape), rng.choice((0, 0, 1, 2, 3, 5))
    if shape.num_replicas > 1 and not theme.faults_coincide and rng.random() < 0.6:
        # Replica 1 has no faults and takes over.
        services = [name for name in services if _REPLICA_0.match(name)]
        pairs = [pair for pair in pairs if any(map(_REPLICA_0.match, pair))]
        num_faults = rng.choice((1, 2, 3, 5))
    if theme.num_faults:
        num_faults = rng.choice(theme.num_faults)
    if theme.services:
        services = [name for name in services if name.startswith(theme.services)] or services
        pairs = [
            one for one in pairs if all(name.startswith(theme.services) for name in one)
        ] or pairs
    kinds, lasts = theme.kinds, theme.fault_seconds
    faults = draw_faults(rng, services, pairs, num_faults, seconds, moments, kinds, lasts)
    if theme.faults_coincide:
        return [replace(fault, at_seconds=faults[0].at_seconds) for fault in faults]
    return faults


def _draw_shape(rng: random.Random, theme: Theme) -> Shape:
    shape = Shape(
        num_replicas=rng.choice((1, 2)),
        num_gateways=rng.choice((1, 1, 2)),
        num_ranks=2 if rng.random() < 0.15 else 1,
        has_redis=rng.random() < 0.3,
        has_step_log=rng.random() < 0.3,
    )
    if not theme.foci and not theme.shape and rng.random() < 0.1:
        return replace(shape, pools=True)
    drafts = rng.choice(("", "", "ngram", "draft_model"))
    fixed = {name: rng.choice(choices) for name, choices in theme.shape.items()}
    tier_gib = rng.choice((0.001, 0.003)) if rng.random() < 0.3 else 0.0
    tier_gib = fixed.get("tier_gib", tier_gib)
    settings = dict(setting for setting in _SETTINGS if rng.random() < _CHANGED)
    crowded = _CROWDED_WITH_TIER if tier_gib else _CROWDED
    num_blocks = NUM_FEW_BLOCKS if rng.random() < crowded else NUM_BLOCKS
    if not tier_gib and rng.random() < _CHANGED:  # A host-memory tier needs prefix hashes.
        settings["enable_prefix_caching"] = False
    if rng.random() < 0.55:
        others = [name for name in POLICIES if name not in (PROGRAM, "fcfs")]
        policy = rng.choice((PROGRAM, PROGRAM, PROGRAM, *others))
        if not (tier_gib and holds_ended(policy)):
            settings["policy"] = policy
        if policy == PROGRAM:
            changed = (one for one in _POLICY_SETTINGS if rng.random() < _POLICY_CHANGED)
            settings |= dict(changed)
    if theme.settings.get("policy"):
        tier_gib = 0.0
    settings |= {name: rng.choice(choices) for name, choices in theme.settings.items()}
    shape = replace(
        shape,
        num_blocks=num_blocks,
        drafts=drafts,
        tier_gib=tier_gib,
        settings=tuple(one for one in settings.items() if one[1] is not None),
    )
    return replace(shape, **fixed)
